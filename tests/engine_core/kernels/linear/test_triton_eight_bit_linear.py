"""8-bit weights on a GPU equal those on any device, up to the rounding of 16-bit inputs."""

from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.kernel_set import torch_kernels
from tandem.engine_core.kernels.linear.quantized_plans import MAX_W8A16_ROWS, SCALE_ROWS
from tandem.engine_core.kernels.quantized_activation import QuantizedActivation
from tandem.engine_core.kernels.reference.quantized_activation import quantize, quantized_matmul
from tandem.engine_core.layers.linear_choice import torch_build_context, triton_build_context
from tandem.engine_core.layers.mlp import GatedMLP
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.layers.quantized import triton_eight_bit_linear
from tandem.engine_core.layers.quantized.eight_bit_linear import EightBitLinear
from tandem.engine_core.layers.quantized.triton_eight_bit_linear import TritonEightBitLinear, library_matmul
from tandem.engine_core.layers.unfused_linear import UnfusedLinear
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme
from tests.fakes.gpus import A100, H200, L4
from tests.support.thinned import thinned

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

FP8, INT8 = EightBitScheme("fp8", Activations.TOKEN), EightBitScheme("int8", Activations.TOKEN)
BLOCKS = EightBitScheme("fp8", Activations.TOKEN, block=(128, 128))
KEPT_FP8, KEPT_INT8, KEPT_BLOCKS = (
    replace(scheme, activations=Activations.UNQUANTIZED) for scheme in (FP8, INT8, BLOCKS)
)
"""Schemes of checkpoints without activation quantization."""


def linear(
    scheme: EightBitScheme, gpu: GpuTraits, outputs: int, device: str, inputs: int = 256
) -> TritonEightBitLinear:
    context = triton_build_context(torch.device(device), torch.float16, gpu, Quantization(scheme))
    found = context.linear("proj", outputs, inputs, True)
    assert isinstance(found, TritonEightBitLinear)
    generator = torch.Generator().manual_seed(outputs)
    found.values.copy_((torch.randn(outputs, inputs, generator=generator) * 50).clamp(-127, 127).to(found.values.dtype))
    found.scales.copy_((torch.rand(found.scales.shape, generator=generator) - 0.5) / 500)
    assert found.bias is not None
    found.bias.fill_(0.5)
    return found


def norm_of(context_device: str) -> RMSNorm:
    norm = RMSNorm.build(256, 1e-5, torch_build_context(torch.device(context_device), torch.float16))
    norm.weight.fill_(1.5)
    return norm


CASES = [(KEPT_FP8, L4), (FP8, A100), (KEPT_INT8, A100), (KEPT_BLOCKS, L4), (BLOCKS, A100)]


@pytest.mark.parametrize(("case", "rows"), list(product(CASES, (1, 5))))
def test_matmuls_equal_the_torch_implementation(case: tuple[EightBitScheme, GpuTraits], rows: int, device: str) -> None:
    found = linear(*case, 141, device)
    plain = EightBitLinear(found.values, found.scales, found.scheme, found.bias, torch_kernels())
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(2)).to(device, torch.float16)
    torch.testing.assert_close(found.apply(x), plain.apply(x), atol=4e-3, rtol=2e-3)


@pytest.mark.parametrize(("case", "rows", "width"), thinned(CASES, (1, 5), (64, 128)))
def test_norm_and_gate_equal_those_of_any_device(
    case: tuple[EightBitScheme, GpuTraits], rows: int, width: int, device: str
) -> None:
    found = linear(*case, 2 * width, device)
    plain = EightBitLinear(found.values, found.scales, found.scheme, found.bias, torch_kernels())
    generator = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(rows, 256, generator=generator).to(device, torch.float16) for _ in range(2))
    for stream in (None, residual):
        y, total = found.apply_normed(x, stream, norm_of(device), Activation.SILU)
        expected, expected_total = plain.apply_normed(x, stream, norm_of(device), Activation.SILU)
        torch.testing.assert_close(y, expected, atol=8e-3, rtol=4e-3)
        torch.testing.assert_close(total, expected_total)


STATIC = EightBitScheme("fp8", Activations.STATIC, per_tensor=True)
MANY = [(FP8, L4), (INT8, A100), (BLOCKS, L4), (STATIC, L4)]
MANY_ROWS = 5


@pytest.mark.parametrize("case", MANY, ids=lambda case: f"{case[0].kind}-{case[0].block}-{case[1].name}")
def test_one_row_keeps_its_inputs(case: tuple[EightBitScheme, GpuTraits], device: str) -> None:
    found = linear(*case, 141, device)
    plain = EightBitLinear(found.values, found.scales, found.scheme, found.bias, torch_kernels())
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(2)).to(device, torch.float16)
    torch.testing.assert_close(found.apply(x), plain.apply(x), atol=4e-3, rtol=2e-3)


def expected_of_rounded(found: TritonEightBitLinear, x: torch.Tensor) -> torch.Tensor:
    to = found.input_format(x.shape[0])
    assert to is not None
    scale_rows = None if found.scheme.block is None else SCALE_ROWS
    return quantized_matmul(quantize(x, to), found.values, found.scales, found.bias, scale_rows)


@pytest.mark.parametrize("case", MANY, ids=lambda case: f"{case[0].kind}-{case[0].block}-{case[1].name}")
def test_many_rows_are_quantized_in_every_path(case: tuple[EightBitScheme, GpuTraits], device: str) -> None:
    found = linear(*case, 80, device)
    if found.input_scale is not None:
        found.input_scale.fill_(0.01)
    found.find_wide_scales()
    plain = EightBitLinear(found.values, found.scales, found.scheme, found.bias, torch_kernels())
    x = torch.randn(MANY_ROWS, 256, generator=torch.Generator().manual_seed(4)).to(device, torch.float16)
    given = found.apply(x)
    assert not torch.equal(given, plain.apply(x))
    torch.testing.assert_close(given, expected_of_rounded(found, x), atol=4e-3, rtol=2e-3)
    y, stream = found.apply_normed(x, x, norm_of(device))
    normed, expected_stream = norm_of(device)(x, x)
    torch.testing.assert_close(y, expected_of_rounded(found, normed), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(stream, expected_stream)
    y, _ = found.apply_normed(x, None, norm_of(device), Activation.SILU)
    assert y.shape == (MANY_ROWS, 40)


def network_of(
    scheme: EightBitScheme, gpu: GpuTraits, device: str
) -> tuple[TritonEightBitLinear, TritonEightBitLinear]:
    """A gate with its up projection, and the next layer.

    Their input scales differ so much that values quantized with the wrong one are clamped, or not.
    """
    gate_up, down = linear(scheme, gpu, 512, device), linear(scheme, gpu, 48, device)
    for part, scale in ((gate_up, 0.02), (down, 5e-4)):
        if part.input_scale is not None:
            part.input_scale.fill_(scale)
    return gate_up, down


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("scheme", [FP8, BLOCKS, INT8, STATIC], ids=lambda scheme: f"{scheme.kind}-{scheme.block}")
def test_a_network_with_fused_quantization_equals_separate_kernels(
    scheme: EightBitScheme, activation: Activation, device: str
) -> None:
    gate_up, down = network_of(scheme, L4, device)
    network = GatedMLP(gate_up, down, 256, activation, torch_kernels())
    x = torch.randn(MANY_ROWS, 256, generator=torch.Generator().manual_seed(5)).to(device, torch.float16)
    norm = norm_of(device)
    with patch.object(triton_eight_bit_linear, "gated_w8a8_gemm") as fused:
        found, stream = network(x, x, norm)
    assert not fused.called
    normed, expected_stream = norm(x, x)
    hidden = torch_kernels().gated_activation(expected_of_rounded(gate_up, normed), activation)
    # A last bit of the first matmul may move an input of the second to a neighboring quantized value.
    torch.testing.assert_close(found, expected_of_rounded(down, hidden), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(stream, expected_stream)


@pytest.mark.parametrize("scheme", [FP8, STATIC], ids=lambda scheme: scheme.activations.value)
def test_wide_float8_weights_take_the_library(
    scheme: EightBitScheme, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    calls: list[int] = []

    def counted(*given: Any) -> torch.Tensor:
        calls.append(1)
        return library_matmul(*given)

    monkeypatch.setattr(triton_eight_bit_linear, "library_matmul", counted)
    x = torch.randn(65, 256, generator=torch.Generator().manual_seed(4)).to(device, torch.bfloat16)
    found = linear(scheme, L4, 64 * L4.multiprocessors + 16, device)
    found.bias = None
    if found.input_scale is not None:
        found.input_scale.fill_(0.01)
        found.scales.fill_(0.001)
    found.find_wide_scales()
    assert (found.wide_scales is not None) == (scheme is STATIC)
    torch.testing.assert_close(found.apply(x), expected_of_rounded(found, x), atol=0.1, rtol=0.02)
    assert calls == [1]


def test_unsupported_numbers_of_inputs_use_dequantized_weights(device: str) -> None:
    x = torch.randn(MANY_ROWS, 144, generator=torch.Generator().manual_seed(6)).to(device, torch.float16)
    rounded = linear(FP8, L4, 32, device, 144)
    torch.testing.assert_close(rounded.apply(x), expected_of_rounded(rounded, x), atol=4e-3, rtol=2e-3)
    for scheme in (INT8, BLOCKS):
        found = linear(scheme, L4, 32, device, 144)
        assert found.input_format(MANY_ROWS) is None
        plain = EightBitLinear(found.values, found.scales, found.scheme, found.bias, torch_kernels())
        torch.testing.assert_close(found.apply(x), plain.apply(x), atol=4e-3, rtol=2e-3)


def test_few_rows_and_gpus_without_float8_keep_their_inputs(device: str) -> None:
    assert linear(FP8, L4, 32, device).input_format(MAX_W8A16_ROWS) is None
    assert linear(FP8, L4, 32, device).input_format(MAX_W8A16_ROWS + 1) is not None
    assert linear(BLOCKS, A100, 32, device).input_format(65) is None
    assert linear(INT8, A100, 32, device).input_format(65) is not None
    assert linear(EightBitScheme("fp8", Activations.UNQUANTIZED), L4, 32, device).input_format(65) is None


def test_scales_of_whole_blocks_are_found_where_every_eighth_is_repeated(device: str) -> None:
    other, found = linear(BLOCKS, H200, 272, device), linear(BLOCKS, H200, 272, device)
    other.find_wide_scales()
    assert other.wide_scales is None
    found.scales.copy_(repeated(found.scales))
    found.find_wide_scales()
    assert found.wide_scales is not None
    assert torch.equal(found.wide_scales, found.scales[::8])


def repeated(scales: torch.Tensor) -> torch.Tensor:
    """Return scales of whole blocks of 128 outputs."""
    return scales[::8].repeat_interleave(8, 0)[: scales.shape[0]]


def test_the_scales_of_later_weights_do_not_change_the_matmul(device: str) -> None:
    wide, narrow = linear(BLOCKS, H200, 272, device), linear(BLOCKS, H200, 272, device)
    unequal, equal = narrow.scales.clone(), repeated(narrow.scales)
    for found, scales in ((wide, equal), (narrow, unequal)):
        found.scales.copy_(scales)
        found.find_wide_scales()
    held = wide.wide_scales
    assert held is not None and narrow.wide_scales is None
    for scales in (equal, 2 * equal):  # Back and forth, as swaps do.
        narrow.scales.copy_(scales)
        narrow.find_wide_scales()
        assert narrow.wide_scales is None
        narrow.scales.copy_(unequal)
        narrow.find_wide_scales()
        wide.scales.copy_(scales)
        wide.find_wide_scales()
        assert wide.wide_scales is held and torch.equal(held, scales[::8])
    wide.scales.copy_(unequal)
    with pytest.raises(ConfigError):
        wide.find_wide_scales()
    wide.scales.copy_(equal)
    wide.find_wide_scales()
    assert wide.wide_scales is held and torch.equal(held, equal[::8])


def close_bytes(found: QuantizedActivation, expected: QuantizedActivation) -> bool:
    """Return whether rows have the same dequantized values except for few at a rounding boundary."""
    assert (found.values.shape, found.scales.shape) == (expected.values.shape, expected.scales.shape)
    difference = (found.dequantize() - expected.dequantize()).square().mean().sqrt()
    return bool(difference < 0.02 * expected.dequantize().square().mean().sqrt())


def hidden_rows(device: str) -> torch.Tensor:
    return torch.randn(MANY_ROWS, 256, generator=torch.Generator().manual_seed(6)).to(device, torch.float16)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("scheme", [FP8, BLOCKS, INT8, STATIC], ids=lambda scheme: f"{scheme.kind}-{scheme.block}")
def test_a_wide_network_fuses_gate_and_quantization(
    scheme: EightBitScheme, activation: Activation, device: str
) -> None:
    """Wide for a GPU with one SM; blocks of unequal scales, and of half of one, use separate kernels."""
    gate_up, down = network_of(scheme, replace(L4, multiprocessors=1), device)
    x, to = hidden_rows(device), down.input_format(MANY_ROWS)
    assert to is not None
    given = (x, x, norm_of(device), activation, to)
    with patch.object(
        triton_eight_bit_linear, "gated_w8a8_gemm", wraps=triton_eight_bit_linear.gated_w8a8_gemm
    ) as fused:
        apart = gate_up.apply_normed_quantized(*given)
        assert fused.called == (scheme is not BLOCKS)
        if scheme is BLOCKS:
            gate_up.scales.copy_(repeated(gate_up.scales))
            gate_up.find_wide_scales()
        rows, stream = gate_up.apply_normed_quantized(*given)
        expected, expected_stream = UnfusedLinear.apply_normed_quantized(gate_up, *given)
        assert fused.call_count == (1 if scheme is BLOCKS else 2)
    assert apart[0].values.shape == rows.values.shape
    torch.testing.assert_close(stream, expected_stream)
    assert close_bytes(rows, expected)


@pytest.mark.parametrize("scheme", [FP8, BLOCKS, INT8, STATIC], ids=lambda scheme: f"{scheme.kind}-{scheme.block}")
def test_a_gate_before_a_layer_in_sixteen_bits_is_fused_too(scheme: EightBitScheme, device: str) -> None:
    gate_up, _ = network_of(scheme, replace(L4, multiprocessors=1), device)
    gate_up.scales.copy_(gate_up.scales[: 1 if scheme.block is None else None].expand_as(gate_up.scales))
    if scheme.block is not None:
        gate_up.scales.copy_(gate_up.scales[::8].repeat_interleave(8, 0))
    gate_up.find_wide_scales()
    x = hidden_rows(device)
    with patch.object(
        triton_eight_bit_linear,
        "gated_w8a8_gemm_unquantized",
        wraps=triton_eight_bit_linear.gated_w8a8_gemm_unquantized,
    ) as fused:
        y, stream = gate_up.apply_normed(x, x, norm_of(device), Activation.SILU)
    assert fused.called
    both, expected_stream = gate_up.apply_normed(x, x, norm_of(device))
    torch.testing.assert_close(stream, expected_stream)
    expected = gate_up.kernels.gated_activation(both, Activation.SILU)
    torch.testing.assert_close(y, expected, atol=2e-3 * expected.abs().max().item(), rtol=1e-2)


def test_a_gate_quantizes_in_groups_for_the_next_layer_despite_output_scales(device: str) -> None:
    gate_up, _ = network_of(FP8, replace(L4, multiprocessors=1), device)
    x, to = hidden_rows(device), linear(BLOCKS, L4, 48, device).input_format(MANY_ROWS)
    assert to is not None and to.group == 128
    given = (x, x, norm_of(device), Activation.SILU, to)
    with patch.object(
        triton_eight_bit_linear, "gated_w8a8_gemm", wraps=triton_eight_bit_linear.gated_w8a8_gemm
    ) as fused:
        rows, _ = gate_up.apply_normed_quantized(*given)
    assert fused.called
    assert close_bytes(rows, UnfusedLinear.apply_normed_quantized(gate_up, *given)[0])


@pytest.mark.parametrize(("multiprocessors", "fused"), [(5, True), (10, False)])
def test_gate_and_quantization_are_fused_if_tiles_keep_the_gpu_busy(
    multiprocessors: int, fused: bool, device: str
) -> None:
    """Four tiles of 64 outputs; all outputs of gate and up would be eight."""
    gate_up, down = network_of(STATIC, replace(L4, multiprocessors=multiprocessors), device)
    x, to = hidden_rows(device), down.input_format(MANY_ROWS)
    assert to is not None
    with patch.object(triton_eight_bit_linear, "gated_w8a8_gemm") as product:
        gate_up.apply_normed_quantized(x, x, norm_of(device), Activation.SILU, to)
    assert product.called == fused


@pytest.mark.parametrize("gpu", [L4, H200], ids=lambda gpu: gpu.name)
def test_a_fused_gate_uses_pdl_if_supported(gpu: GpuTraits, device: str) -> None:
    gate_up, down = network_of(STATIC, replace(gpu, multiprocessors=1), device)
    x, to = hidden_rows(device), down.input_format(MANY_ROWS)
    assert to is not None
    with patch.object(triton_eight_bit_linear, "gated_w8a8_gemm") as product:
        gate_up.apply_normed_quantized(x, x, norm_of(device), Activation.SILU, to)
    assert product.call_args.args[-1] is gpu.pdl
