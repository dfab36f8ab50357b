"""Sampling as the runtime calls it: from a step's packed inputs to tokens, in the device's own way."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tandem.engine_core.contracts import Constraint
from tandem.engine_core.kernels.reference.sampling import logprob_lines
from tandem.engine_core.runtime.staging import Ints, Packed
from tandem.engine_core.runtime.tables import DeviceTables
from tandem.engine_core.sampling.sampler import sample


class MaskFiller(Protocol):
    """Knows the constraints of a step from the inside."""

    def fill(self, masks: Sequence[tuple[Constraint, int]], out: Ints) -> None:
        """Writes what each constraint allows into the row of `out` that is named beside it.

        out: [rows, ceil(V / 32)] int32, contiguous; bit i % 32 of word i // 32 stands for token i. What is beyond the
        vocabulary does not matter.
        """


SLICE = 256
"""Most prompt positions whose logits exist at once."""


class TokenScorer(Protocol):
    """Looks one token a row up in the row's log-softmax, and the row's most probable tokens."""

    def run(self, logits: Tensor, chosen: Tensor, top: int, lines: Tensor) -> None:
        """logits: [S, V]; chosen: [S] int32; lines: [S, 1 + 2 * top] int32, written as in `logprob_lines`."""


class TorchScorer:
    """The oracle, on any device."""

    def run(self, logits: Tensor, chosen: Tensor, top: int, lines: Tensor) -> None:
        """As in `TokenScorer`."""
        lines.copy_(logprob_lines(logits, chosen, top))


class TokenSampler(Protocol):
    """Draws a token for every row of a step that samples, and writes it into the token table."""

    def run(self, logits: Tensor, inputs: Tensor, packed: Packed, allowed: Tensor | None, out: Tensor) -> None:
        """logits: [S, V]; inputs: the packed step on the device; allowed: [S, ceil(V / 32)] int32 or None;
        out: [S] int32, written."""


class TorchSampler:
    """The oracle in torch, on any device."""

    def __init__(self, tables: DeviceTables) -> None:
        self.tables = tables

    def run(self, logits: Tensor, inputs: Tensor, packed: Packed, allowed: Tensor | None, out: Tensor) -> None:
        """As in `TokenSampler`."""
        out[:] = sample(logits, self.tables.sampling_rows(inputs, packed), allowed)
        self.tables.append(inputs, packed, out)
