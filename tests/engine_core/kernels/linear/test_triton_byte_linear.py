"""Weights of one byte on a GPU equal those on any device, up to the rounding of 16-bit inputs."""

from itertools import product

import pytest
import torch

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.kernel_set import torch_kernels
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear_choice import triton_build_context
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.layers.quantized.byte_linear import ByteLinear
from tandem.engine_core.layers.quantized.triton_byte_linear import TritonByteLinear
from tandem.engine_core.quantization.scheme import Activations, ByteScheme
from tests.fakes.gpus import A100, L4

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

FP8, INT8 = ByteScheme("fp8", Activations.TOKEN), ByteScheme("int8", Activations.TOKEN)
BLOCKS = ByteScheme("fp8", Activations.TOKEN, block=(128, 128))


def linear(scheme: ByteScheme, gpu: GpuTraits, outputs: int, device: str) -> TritonByteLinear:
    context = triton_build_context(torch.device(device), torch.float16, gpu, scheme)
    found = context.linear_method.build(outputs, 256, True, context)
    assert isinstance(found, TritonByteLinear)
    generator = torch.Generator().manual_seed(outputs)
    found.values.copy_((torch.randn(outputs, 256, generator=generator) * 50).clamp(-127, 127).to(found.values.dtype))
    found.scales.copy_(torch.rand(found.scales.shape, generator=generator) / 1000)
    assert found.bias is not None
    found.bias.fill_(0.5)
    return found


def norm_of(context_device: str) -> RMSNorm:
    context = BuildContext(torch.device(context_device), torch.float16, None, None, torch_kernels())  # type: ignore[arg-type]
    norm = RMSNorm.build(256, 1e-5, context)
    norm.weight.fill_(1.5)
    return norm


CASES = [(FP8, L4), (FP8, A100), (INT8, A100), (BLOCKS, L4), (BLOCKS, A100)]


@pytest.mark.parametrize(("case", "rows"), list(product(CASES, (1, 5))))
def test_products_equal_those_of_any_device(case: tuple[ByteScheme, GpuTraits], rows: int, device: str) -> None:
    found = linear(*case, 141, device)
    plain = ByteLinear(found.values, found.scales, found.scheme, found.bias, torch_kernels())
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(2)).to(device, torch.float16)
    torch.testing.assert_close(found.apply(x), plain.apply(x), atol=4e-3, rtol=2e-3)


@pytest.mark.parametrize(("case", "rows"), list(product(CASES, (1, 5))))
@pytest.mark.parametrize("width", [64, 128])
def test_norm_and_gate_equal_those_of_any_device(
    case: tuple[ByteScheme, GpuTraits], rows: int, width: int, device: str
) -> None:
    found = linear(*case, 2 * width, device)
    plain = ByteLinear(found.values, found.scales, found.scheme, found.bias, torch_kernels())
    generator = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(rows, 256, generator=generator).to(device, torch.float16) for _ in range(2))
    for stream in (None, residual):
        y, total = found.apply_normed(x, stream, norm_of(device), Activation.SILU)
        expected, expected_total = plain.apply_normed(x, stream, norm_of(device), Activation.SILU)
        torch.testing.assert_close(y, expected, atol=8e-3, rtol=4e-3)
        torch.testing.assert_close(total, expected_total)


def test_many_rows_of_bfloat16_are_rounded_and_others_are_not(device: str) -> None:
    found = linear(FP8, L4, 144, device)
    plain = ByteLinear(found.values, found.scales, found.scheme, None, torch_kernels())
    found.bias = None
    x = torch.randn(65, 256, generator=torch.Generator().manual_seed(4)).to(device)
    rounded, expected = found.apply(x.bfloat16()), plain.apply(x.bfloat16())
    assert not torch.equal(rounded, expected)
    torch.testing.assert_close(rounded, expected, atol=0.1, rtol=0.05)
    assert torch.equal(found.apply(x.half()), plain.apply(x.half()))
