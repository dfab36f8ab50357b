"""Scales of the 8-bit weights of experts.

The weights of all experts are [parts, outputs, inputs], where an expert has one part, or two in a fused gate and up
projection. Scales are float32, [parts, outputs] for one per output, or [parts, outputs / 128, inputs / 128], rounded
up, for one per block.
"""

from typing import Literal

from torch import Tensor

SCALE_BLOCK = 128
"""Outputs and inputs of a block that share a scale."""
Granularity = Literal["none", "output", "block"]
SCALED: dict[Granularity, int] = {"none": 0, "output": 1, "block": 2}
"""Values of the kernels' SCALES."""


def scale_granularity(scales: Tensor | None) -> Granularity:
    """Return what has a scale of its own; none for 16-bit weights."""
    if scales is None:
        return "none"
    return "output" if scales.ndim == 2 else "block"
