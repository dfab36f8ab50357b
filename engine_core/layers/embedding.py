"""Token embedding."""

from torch import Tensor

from tandem.engine_core.loader.slots import WeightSlot


class Embedding:
    """A row a token. The table may be the weight of the output head, in whatever memory layout that wants."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [vocab, hidden]."""
        self.weight = weight

    def __call__(self, ids: Tensor) -> Tensor:
        """ids: [T] int64. Returns [T, hidden]."""
        return self.weight[ids]

    def slots(self, name: str) -> dict[str, WeightSlot]:
        """Where the checkpoint tensor goes."""
        return {f"{name}.weight": WeightSlot(self.weight, 0, self.weight.shape[0])}
