"""Scales of the 8-bit weights of experts.

Weights are [parts, outputs, inputs]. An expert has one part, or two for a fused gate and up projection. Scales are
float32: [parts, outputs] per output, or [parts, ceil(outputs / 128), ceil(inputs / 128)] per block.
"""

from typing import Literal

from torch import Tensor

SCALE_BLOCK = 128
"""Number of outputs, and of inputs, of a block with one scale."""
Granularity = Literal["none", "output", "block"]
SCALED: dict[Granularity, int] = {"none": 0, "output": 1, "block": 2}
"""Values of the kernels' SCALES."""


def scale_granularity(scales: Tensor | None) -> Granularity:
    """Return whether scales are per output or per block; none for 16-bit weights."""
    if scales is None:
        return "none"
    return "output" if scales.ndim == 2 else "block"
