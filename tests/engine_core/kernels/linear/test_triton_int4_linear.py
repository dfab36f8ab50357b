"""Int4 weights on a GPU equal those on any device, up to the rounding of 16-bit inputs."""

from copy import copy

import pytest
import torch

from tandem.engine_core.kernels import gather_columns
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.kernel_set import torch_kernels
from tandem.engine_core.kernels.linear import quantized_gemv
from tandem.engine_core.kernels.linear.int4_layout import from_kernel_layout
from tandem.engine_core.layers.linear_choice import triton_build_context
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.layers.quantized.int4_linear import Int4Linear
from tandem.engine_core.layers.quantized.triton_int4_linear import TritonInt4Linear
from tandem.engine_core.quantization.int4 import pack, unpack
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import Int4Scheme
from tests.fakes.gpus import A100
from tests.fakes.launched_kernel import LaunchedKernel

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

INPUTS = 256


def linears(outputs: int, ordered: bool, device: str) -> tuple[TritonInt4Linear, Int4Linear]:
    """The same weights for the GPU and for any device."""
    context = triton_build_context(
        torch.device(device), torch.float16, A100, Quantization(Int4Scheme("gptq", 64, False))
    )
    found = context.linear("proj", outputs, INPUTS, True)
    assert isinstance(found, TritonInt4Linear)
    generator = torch.Generator().manual_seed(outputs)
    found.words.copy_(torch.randint(-(2**31), 2**31, found.words.shape, generator=generator, dtype=torch.int32))
    found.scales.copy_((torch.rand(found.scales.shape, generator=generator) - 0.5) / 50)
    found.zeros.copy_(torch.randint(0, 16, found.zeros.shape, generator=generator, dtype=torch.uint8))
    found.order = torch.randperm(INPUTS, generator=generator).int().to(device) if ordered else None
    assert found.bias is not None
    found.bias.fill_(0.5)
    words = pack(from_kernel_layout(unpack(found.words), 64))
    plain = Int4Linear(words, found.scales, found.zeros, found.scheme, found.bias, torch_kernels())
    plain.order = found.order
    return found, plain


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 65])
def test_matmuls_equal_the_torch_implementation(rows: int, ordered: bool, device: str) -> None:
    found, plain = linears(72, ordered, device)
    x = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(2)).to(device, torch.float16)
    torch.testing.assert_close(found.apply(x), plain.apply(x), atol=8e-3, rtol=4e-3)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("activation", [None, Activation.SILU])
def test_norm_and_gate_equal_those_of_any_device(
    rows: int, ordered: bool, activation: Activation | None, device: str
) -> None:
    found, plain = linears(80, ordered, device)
    norm = RMSNorm(torch.full((INPUTS,), 1.5, device=device, dtype=torch.float16), 1e-5, torch_kernels())
    generator = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(rows, INPUTS, generator=generator).to(device, torch.float16) for _ in range(2))
    for stream in (None, residual):
        y, total = found.apply_normed(x, stream, norm, activation)
        expected, expected_total = plain.apply_normed(x, stream, norm, activation)
        torch.testing.assert_close(y, expected, atol=2e-2, rtol=1e-2)
        torch.testing.assert_close(total, expected_total)


@pytest.mark.parametrize("rows", [1, 2, 5, 65])
def test_matmuls_with_an_order_equal_those_of_presorted_inputs(rows: int, device: str) -> None:
    found, _ = linears(72, True, device)
    usual = copy(found)
    usual.order = None
    order = found.order
    assert order is not None
    weight = torch.full((INPUTS,), 1.5, device=device, dtype=torch.float16)
    norm = RMSNorm(weight, 1e-5, found.kernels)
    generator = torch.Generator().manual_seed(6)
    x, residual = (torch.randn(rows, INPUTS, generator=generator).to(device, torch.float16) for _ in range(2))
    torch.testing.assert_close(found.apply(x), usual.apply(x[:, order]), atol=2e-3, rtol=2e-3)
    gated, expected_gated = (one.apply_gated(y, Activation.SILU) for one, y in ((found, x), (usual, x[:, order])))
    torch.testing.assert_close(gated, expected_gated, atol=4e-3, rtol=2e-3)
    for activation in (None, Activation.SILU):
        y, total = found.apply_normed(x, residual, norm, activation)
        normed, expected_total = norm(x, residual)
        ordered = normed[:, order]
        expected = usual.apply(ordered) if activation is None else usual.apply_gated(ordered, activation)
        torch.testing.assert_close(y, expected, atol=4e-3, rtol=2e-3)
        assert torch.equal(total, expected_total)


def test_only_several_rows_without_a_norm_are_gathered_by_a_launch_of_their_own(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = linears(72, True, device)
    norm = RMSNorm(torch.ones(INPUTS, device=device, dtype=torch.float16), 1e-5, found.kernels)
    kernel = LaunchedKernel()
    monkeypatch.setattr(gather_columns, "_gather_columns_kernel", kernel)
    for rows in (1, 5, 65):
        x = torch.zeros(rows, INPUTS, device=device, dtype=torch.float16)
        for activation in (None, Activation.SILU):
            found.apply_normed(x, x, norm, activation)
    found.apply(x[:1])
    assert not kernel.options
    found.ordered(x, found.order)
    assert kernel.options["PDL"] == found.gpu.pdl


def test_one_row_with_an_order_and_its_norm_take_one_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = linears(72, True, device)
    kernel = LaunchedKernel()
    monkeypatch.setattr(quantized_gemv, "quantized_gemv_kernel", kernel)
    x = torch.zeros(1, INPUTS, device=device, dtype=torch.float16)
    found.apply_normed(x, x, RMSNorm(x[0], 1e-5, found.kernels))
    assert (kernel.options["ORDERED"], kernel.options["MODE"]) == (True, 2)


@pytest.mark.parametrize("ordered", [False, True])
def test_one_row_with_an_order_has_plans_of_its_own(
    ordered: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = linears(72, ordered, device)
    kernel, tiles = LaunchedKernel(), []
    monkeypatch.setattr(quantized_gemv, "quantized_gemv_kernel", kernel)
    x = torch.zeros(1, INPUTS, device=device, dtype=torch.float16)
    for launch in (
        lambda: found.apply(x),
        lambda: found.apply_gated(x, Activation.SILU),
        lambda: found.apply_normed(x, x, RMSNorm(x[0], 1e-5, found.kernels), Activation.SILU),
    ):
        launch()
        tiles.append(kernel.options["TILES"])
    assert tiles == ([2, 10, 10] if ordered else [1, 4, 4])


def test_one_row_in_float32_is_not_rounded_to_float16(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, plain = linears(72, False, device)
    kernel = LaunchedKernel()
    monkeypatch.setattr(quantized_gemv, "quantized_gemv_kernel", kernel)
    x = torch.randn(1, INPUTS, generator=torch.Generator().manual_seed(4)).to(device)
    norm = RMSNorm(torch.ones(INPUTS, device=device), 1e-5, torch_kernels())
    for linear in (found, plain):
        assert linear.bias is not None
        linear.bias = linear.bias.float()
    torch.testing.assert_close(found.apply(x), plain.apply(x))
    torch.testing.assert_close(found.apply_normed(x, x, norm)[0], plain.apply_normed(x, x, norm)[0])
    assert not kernel.options


@pytest.mark.parametrize("ordered", [False, True])
def test_loaded_words_are_brought_into_the_order_of_the_kernels(ordered: bool, device: str) -> None:
    found, _ = linears(72, False, device)
    plain = Int4Linear(found.words.clone(), found.scales, found.zeros, found.scheme, found.bias, torch_kernels())
    groups = torch.arange(INPUTS, dtype=torch.int32, device=device) // 64
    if ordered:
        groups = groups[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(4)).to(device)]
    for linear in (found, plain):
        linear.sort(groups[None], "a map")
    assert (found.order is not None) == ordered
    x = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(5)).to(device, torch.float16)
    torch.testing.assert_close(found.apply(x), plain.apply(x), atol=8e-3, rtol=4e-3)
