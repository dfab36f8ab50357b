"""Products on a CPU whose inputs are rounded to one byte.

A GPU rounds those of two and more rows, the engine on a CPU none. The rounding is that of the oracle of the kernels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from tandem.engine_core.kernels.byte_rows import FP8_MAX
from tandem.engine_core.kernels.reference.byte_rows import quantize
from tandem.engine_core.layers.quantized.byte_linear import ByteLinear
from tandem.engine_core.layers.quantized.quantized_linear import QuantizedLinear


@contextmanager
def rounded_inputs() -> Iterator[None]:
    """Round the inputs of all weights of one byte whose checkpoint expects that."""

    def apply(linear: ByteLinear, x: Tensor, out: Tensor | None = None) -> Tensor:
        to = linear.rounded_format()
        rounded = x if to is None else quantize(x, to).numbers().to(x.dtype)
        return QuantizedLinear.apply(linear, rounded, out)

    with patch.object(ByteLinear, "apply", apply):
        yield


def calibrate(run: Callable[[], object]) -> None:
    """Fit the static scales of inputs to what a run computes.

    The largest number becomes the largest of the format.
    """
    largest: dict[ByteLinear, float] = {}

    def apply(linear: ByteLinear, x: Tensor, out: Tensor | None = None) -> Tensor:
        largest[linear] = max(largest.get(linear, 0.0), x.abs().max().item())
        return QuantizedLinear.apply(linear, x, out)

    with patch.object(ByteLinear, "apply", apply):
        run()
    for linear, number in largest.items():
        if linear.input_scale is not None:
            linear.input_scale.fill_(number / FP8_MAX)
