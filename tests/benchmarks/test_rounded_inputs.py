"""Products on a CPU whose inputs are rounded as a GPU rounds them."""

import pytest
import torch
from torch import Tensor

from benchmarks.default_model.rounded_inputs import calibrate, rounded_inputs
from tandem.engine_core.kernels.linear.quantized_plans import SCALE_ROWS
from tandem.engine_core.kernels.quantized_activation import FP8_MAX
from tandem.engine_core.kernels.reference.quantized_activation import quantize, quantized_matmul
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.layers.quantized.eight_bit_linear import EightBitLinear, EightBitMethod
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme

CHANNEL = EightBitScheme("fp8", Activations.TOKEN)
STATIC = EightBitScheme("fp8", Activations.STATIC, per_tensor=True)
INT8 = EightBitScheme("int8", Activations.TOKEN)
BLOCKS = EightBitScheme("fp8", Activations.TOKEN, block=(128, 128))


def linear(scheme: EightBitScheme) -> EightBitLinear:
    built = EightBitMethod(scheme).build(48, 256, False, torch_build_context(torch.device("cpu"), torch.float32))
    assert isinstance(built, EightBitLinear)
    built.values.copy_((torch.randn(48, 256) * 20).clamp(-127, 127).to(built.values.dtype))
    built.scales.uniform_(0.01, 0.02)
    return built


def numbers() -> Tensor:
    return torch.randn(5, 256, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scheme", [CHANNEL, STATIC, INT8, BLOCKS], ids=str)
def test_the_product_is_that_of_the_rounded_inputs(scheme: EightBitScheme) -> None:
    built, x = linear(scheme), numbers()
    exact, to = built.apply(x), built.activation_format()
    assert to is not None
    with rounded_inputs():
        rounded = built.apply(x)
    block_rows = None if scheme.block is None else SCALE_ROWS
    expected = quantized_matmul(quantize(x, to), built.values, built.scales, None, block_rows)
    torch.testing.assert_close(rounded, expected, rtol=1e-5, atol=1e-4)
    assert not torch.equal(rounded, exact)
    assert torch.equal(built.apply(x), exact), "they are rounded beyond the block"


def test_inputs_that_a_checkpoint_leaves_as_they_are_stay_so() -> None:
    built, x = linear(EightBitScheme("fp8", Activations.UNQUANTIZED)), numbers()
    exact = built.apply(x)
    with rounded_inputs():
        assert torch.equal(built.apply(x), exact)


def test_static_scales_are_fitted_to_the_largest_input() -> None:
    built, other, x = linear(STATIC), linear(CHANNEL), numbers()
    calibrate(lambda: (built.apply(x), built.apply(-2 * x), other.apply(x)))
    assert built.input_scale is not None and other.input_scale is None
    assert built.input_scale.item() == pytest.approx(2 * x.abs().max().item() / FP8_MAX)
