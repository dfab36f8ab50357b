"""8-bit weights in groups on a GPU equal those on any device, up to the rounding of 16-bit inputs."""

from unittest.mock import patch

import pytest
import torch

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.kernel_set import torch_kernels
from tandem.engine_core.kernels.linear.quantized_plans import choose_eight_bit, choose_eight_bit_gated
from tandem.engine_core.kernels.tiles.plan_types import SplitKPlan
from tandem.engine_core.layers.linear_choice import triton_build_context
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.layers.quantized import triton_w8a16_linear
from tandem.engine_core.layers.quantized.triton_w8a16_linear import TritonW8A16Linear
from tandem.engine_core.layers.quantized.w8a16_linear import W8A16Linear
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import W8A16Scheme
from tests.fakes.gpus import A100, H200, L4

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

INPUTS = 256
SCHEMES = {
    "groups_of_128": W8A16Scheme("int8", "gptq", 128),
    "groups_of_32": W8A16Scheme("int8", "compressed-tensors", 32),
    "one_group": W8A16Scheme("int8", "gptq", None),
    "fp8": W8A16Scheme("fp8", None, 64),
}


def linears(
    scheme: W8A16Scheme, outputs: int, ordered: bool, device: str, gpu: GpuTraits = L4
) -> tuple[TritonW8A16Linear, W8A16Linear]:
    """The same weights for the GPU and for any device."""
    context = triton_build_context(torch.device(device), torch.float16, gpu, Quantization(scheme))
    found = context.linear("proj", outputs, INPUTS, True)
    assert isinstance(found, TritonW8A16Linear)
    generator = torch.Generator().manual_seed(outputs)
    values = (torch.randn(outputs, INPUTS, generator=generator) * 50).clamp(-128, 127)
    found.values.copy_(values.to(found.values.dtype))
    found.scales.copy_((torch.rand(found.scales.shape, generator=generator) - 0.5) / 500)
    found.order = torch.randperm(INPUTS, generator=generator).int().to(device) if ordered else None
    assert found.bias is not None
    found.bias.fill_(0.5)
    plain = W8A16Linear(found.values, found.scales, scheme, found.bias, torch_kernels())
    plain.order = found.order
    return found, plain


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 65])
@pytest.mark.parametrize("name", SCHEMES)
def test_matmuls_equal_the_torch_implementation(name: str, rows: int, ordered: bool, device: str) -> None:
    found, plain = linears(SCHEMES[name], 72, ordered, device)
    x = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(2)).to(device, torch.float16)
    torch.testing.assert_close(found.apply(x), plain.apply(x), atol=8e-3, rtol=4e-3)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("name", "ordered", "gpu"),
    [("groups_of_128", False, L4), ("groups_of_128", True, L4), ("fp8", False, A100), ("one_group", False, L4)],
    ids=str,
)
def test_norm_and_gate_equal_those_of_any_device(
    name: str, ordered: bool, gpu: GpuTraits, rows: int, device: str
) -> None:
    found, plain = linears(SCHEMES[name], 80, ordered, device, gpu)
    norm = RMSNorm(torch.full((INPUTS,), 1.5, device=device, dtype=torch.float16), 1e-5, torch_kernels())
    generator = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(rows, INPUTS, generator=generator).to(device, torch.float16) for _ in range(2))
    for activation in (None, Activation.SILU):
        y, total = found.apply_normed(x, residual, norm, activation)
        expected, expected_total = plain.apply_normed(x, residual, norm, activation)
        torch.testing.assert_close(y, expected, atol=2e-2, rtol=1e-2)
        torch.testing.assert_close(total, expected_total)


@pytest.mark.parametrize(("rows", "kernel"), [(1, "quantized_gemv"), (2, "splitk_gemm"), (64, "splitk_gemm")])
@pytest.mark.parametrize("name", SCHEMES)
def test_up_to_64_rows_no_weight_is_dequantized_by_a_launch_of_its_own(
    name: str, rows: int, kernel: str, device: str
) -> None:
    found, _ = linears(SCHEMES[name], 64, False, device)
    x = torch.zeros(rows, INPUTS, device=device, dtype=torch.float16)
    with (
        patch.object(triton_w8a16_linear, kernel, wraps=getattr(triton_w8a16_linear, kernel)) as used,
        patch.object(triton_w8a16_linear, "dequantize_eight_bit") as dequantized,
    ):
        found.apply(x)
    assert used.called and not dequantized.called


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("rows", [2, 16, 64])
def test_no_step_of_a_plan_crosses_a_group(group: int, rows: int) -> None:
    for chooser in (choose_eight_bit, choose_eight_bit_gated):
        plan = chooser(rows, 4096, 4096, H200, group)
        assert isinstance(plan, SplitKPlan) and group % plan.block_k == 0
