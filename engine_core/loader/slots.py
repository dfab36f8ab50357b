"""How a model tells the loader where the tensors of a checkpoint belong."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The place of one checkpoint tensor: rows `start` to `start + length - 1` of a parameter, along dimension 0."""

    parameter: Tensor
    start: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        """What the checkpoint tensor has to measure."""
        return (self.length, *self.parameter.shape[1:])

    @property
    def target(self) -> Tensor:
        """The rows themselves, to be written."""
        return self.parameter.narrow(0, self.start, self.length)


class Loadable(Protocol):
    """A model as the loader sees it."""

    def weight_slots(self) -> dict[str, WeightSlot]:
        """A slot for each name that a checkpoint may use.

        Several names may cover the same rows (a fused projection and its parts): a checkpoint has to cover all rows of
        each parameter once. The preferred names come first: those are named when rows are not covered.
        """

    def tied_names(self) -> tuple[str, str] | None:
        """Two names of one parameter that a checkpoint may hold both; None if no parameter is shared."""

    def untie(self) -> None:
        """Gives the second of the tied names a parameter of its own."""
