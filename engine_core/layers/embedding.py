"""Token embedding."""

import torch
from torch import Tensor

from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.loader.slots import WeightSlot


class Embedding:
    """Embedding table with one row per token of the vocabulary.

    Some families (Gemma) scale the embeddings. A table that is tied to the output head is stored unscaled.
    """

    def __init__(self, table: Tensor, scale: float = 1.0) -> None:
        """Store the table, [vocab, hidden], in any memory layout.

        scale: factor of the embeddings, in the table's dtype.
        """
        self.table = table
        self.scale = scale

    @classmethod
    def build(cls, vocab: int, hidden: int, context: BuildContext, scale: float = 1.0) -> "Embedding":
        """Allocate an untied, uninitialized table.

        scale: factor of the embeddings, rounded to the model's dtype.
        """
        return cls._scaled(torch.empty(vocab, hidden, device=context.device, dtype=context.dtype), scale)

    @classmethod
    def tied_to(cls, head: LinearWeights, scale: float = 1.0) -> "Embedding":
        """Share the storage of an output head, in its memory layout.

        scale: factor of the embeddings, rounded to the model's dtype.
        """
        return cls._scaled(head.embedding_table(), scale)

    @classmethod
    def _scaled(cls, table: Tensor, scale: float) -> "Embedding":
        return cls(table, torch.tensor(scale, dtype=table.dtype).item())

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the embeddings of token ids, [T, hidden].

        ids: [T] int64.
        """
        # On an H200 `table[ids]` takes 4.6 us for one token, `index_select` 2 for a row of the rotary table.
        rows = self.table.index_select(0, ids)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)

    def slots(self, name: str) -> list[WeightSlot]:
        """List the slot of the checkpoint's tensor."""
        return [WeightSlot.whole(f"{name}.weight", self.table)]
