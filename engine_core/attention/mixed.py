"""Attention of steps that hold both: single tokens as in decode, and the tokens of prompts.

A ragged kernel would take a whole tile of queries for each single token and read its keys once a query head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tandem.engine_core.attention.base import PromptAttention, Span
from tandem.engine_core.attention.triton import DecodeRows, TritonDecode
from tandem.engine_core.kernels.attention.paged_decode import split_scratch


@dataclass(frozen=True, slots=True)
class MixedRows:
    """A step whose single tokens come first. A captured graph keeps reading these places."""

    singles: DecodeRows
    prompts: PromptAttention
    """Planned for the rest."""
    out: Tensor
    """[T, heads, head_dim], where results go. Padding gets what lay there: only its own keys come of it, on the padding
    page, and only padding reads those."""


class MixedAttention:
    """An `AttentionBackend` for steps laid out by a `Shape`; their plan is a `MixedRows`."""

    def __init__(self) -> None:
        self.decode = TritonDecode()

    def plan(self, spans: Sequence[Span], pages: Tensor, page_size: int) -> MixedRows:
        """There is no whole to plan: the runtime plans the prompts."""
        raise TypeError("mixed steps are not planned as one; give the batch a MixedRows")

    def run(self, plan: MixedRows, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """As in `AttentionBackend`."""
        count = len(plan.singles.rows)
        # Held until both kernels are enqueued: they run side by side, and memory of the one must not be the other's.
        scratch = split_scratch(query[:count], plan.singles.splits)
        if count:
            self.decode.run(plan.singles, query[:count], keys, values, scale, plan.out[:count], scratch)
        plan.prompts.run_into(plan.out[count:], query[count:], keys, values, scale, beside_decode=count > 0)
        return plan.out
