"""Int4 weights of experts, as kernels read them."""

from dataclasses import dataclass

from torch import Tensor

from tandem.engine_core.kernels.linear.int4_layout import PER_WORD, run_length


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weights:
    """One projection of all experts, or two of each: the gate before the up projection.

    A weight is scale * (q - zero), q from 0 to 15.
    """

    words: Tensor
    """[parts, outputs, inputs / 8] int32, in the layout of `linear.int4_layout` for kernels."""
    scales: Tensor
    """[parts, groups, outputs] float32: those of many outputs are read at once."""
    zeros: Tensor
    """[parts, groups, outputs] uint8."""

    @property
    def part_shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs of a part."""
        return self.words.shape[1], self.words.shape[2] * PER_WORD

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.part_shape[1] // self.scales.shape[1]

    @property
    def run(self) -> int:
        """Run length of the layout in words, 0 if no kernel reads groups of this size."""
        return run_length(self.part_shape[1], self.group)
