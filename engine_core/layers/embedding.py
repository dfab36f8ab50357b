"""Token embedding."""

import torch
from torch import Tensor

from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.loader.slots import WeightSlot


class Embedding:
    """A table with one row for each token of the vocabulary."""

    def __init__(self, table: Tensor) -> None:
        """Keep the table, [vocab, hidden], in any memory layout."""
        self.table = table

    @classmethod
    def build(cls, vocab: int, hidden: int, context: BuildContext) -> "Embedding":
        """Allocate a table of its own, not filled yet."""
        return cls(torch.empty(vocab, hidden, device=context.device, dtype=context.dtype))

    @classmethod
    def tied_to(cls, head: LinearWeights) -> "Embedding":
        """Share the storage of an output head, in the memory layout of that head."""
        return cls(head.embedding_table())

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the embeddings of token ids, [T, hidden].

        ids: [T] int64.
        """
        return self.table[ids]

    def slots(self, name: str) -> list[WeightSlot]:
        """List the slot of the checkpoint's tensor."""
        return [WeightSlot.whole(f"{name}.weight", self.table)]
