"""Emulate W8A8 matmuls on a CPU.

GPU kernels quantize the inputs of two or more rows; the engine on a CPU does not. The rounding is that of the kernels'
oracle.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from tandem.engine_core.kernels.quantized_activation import FP8_MAX
from tandem.engine_core.kernels.reference.quantized_activation import quantize
from tandem.engine_core.layers.quantized.eight_bit_linear import EightBitLinear
from tandem.engine_core.layers.quantized.quantized_linear import QuantizedLinear


@contextmanager
def rounded_inputs() -> Iterator[None]:
    """Quantize the inputs of all 8-bit linear layers with quantized activations."""

    def apply(linear: EightBitLinear, x: Tensor, out: Tensor | None = None) -> Tensor:
        to = linear.activation_format()
        rounded = x if to is None else quantize(x, to).dequantize().to(x.dtype)
        return QuantizedLinear.apply(linear, rounded, out)

    with patch.object(EightBitLinear, "apply", apply):
        yield


def calibrate(run: Callable[[], object]) -> None:
    """Calibrate static input scales on a run, mapping the largest input to the largest number of the format."""
    largest: dict[EightBitLinear, float] = {}

    def apply(linear: EightBitLinear, x: Tensor, out: Tensor | None = None) -> Tensor:
        largest[linear] = max(largest.get(linear, 0.0), x.abs().max().item())
        return QuantizedLinear.apply(linear, x, out)

    with patch.object(EightBitLinear, "apply", apply):
        run()
    for linear, number in largest.items():
        if linear.input_scale is not None:
            linear.input_scale.fill_(number / FP8_MAX)
