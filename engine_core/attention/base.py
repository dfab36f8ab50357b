"""What a forward pass is told beside its weights, and what an attention backend is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """A row of a step as attention sees it, known on the host: `length` queries at positions from `start` on.

    `row` is its row of the page table, `offset` where its queries begin among the step's tokens; its keys are positions
    0 to `start + length - 1`.
    """

    row: int
    offset: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One forward pass. T tokens of all rows one after the other, S of them sampled from, on the model's device.

    Passed explicitly from the runtime down to the layers: there is no ambient context.
    """

    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, position of each token in its sequence."""
    slot_mapping: Tensor
    """[T] int64, flat place of each token's key and value in the pool: page * page_size + offset."""
    sample_index: Tensor | None
    """[S] int64, which of the T tokens are sampled from; None: all of them."""
    backend: "AttentionBackend"
    plan: Any
    """What `backend.plan` returned for this step; opaque to everybody else."""


class AttentionBackend(Protocol):
    """Attention over the paged KV pool."""

    def plan(self, spans: Sequence[Span], pages: Tensor, page_size: int) -> Any:
        """Prepares one step, once for all layers. Does not synchronise with the device.

        pages: [rows, pages_per_row] int32 on the device, the whole page table.
        """

    def run(self, plan: Any, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Causal attention of one layer, whose new keys and values are in the pool already.

        query: [T, heads, head_dim]; keys, values: [places, kv_heads, head_dim], the layer's whole pool, indexed by
        `slot_mapping`, in the query's dtype or as in `kernels.kv_dtype`. Returns [T, heads, head_dim] in the query's.
        """


class PromptAttention(Protocol):
    """Attention of rows of several tokens that a graph can hold, and that is planned anew for each step."""

    def plan(self, spans: Sequence[Span], pages: Tensor, page_size: int) -> None:
        """As in `AttentionBackend`, into memory that the graph reads."""

    def run_into(
        self, out: Tensor, query: Tensor, keys: Tensor, values: Tensor, scale: float, *, beside_decode: bool
    ) -> None:
        """As `AttentionBackend.run`. out: where to write, shaped like query; what lies beyond the planned queries stays
        as it is. beside_decode: whether the kernel right before is `paged_decode` with `pdl`, for other queries of the
        same tensor."""
