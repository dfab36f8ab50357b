"""Attention of steps that hold both: single tokens as in decode, and the tokens of prompts.

A ragged kernel would take a whole tile of queries for each single token and read its keys once a query head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_core.attention.base import PromptAttention, Span
from engine_core.attention.triton import DecodeRows, TritonDecode


@dataclass(frozen=True, slots=True)
class MixedRows:
    """A step whose single tokens come first. A captured graph keeps reading these places."""

    singles: DecodeRows
    prompts: PromptAttention
    """Planned for the rest."""


class MixedAttention:
    """An `AttentionBackend` for steps laid out by a `Shape`; their plan is a `MixedRows`."""

    def __init__(self) -> None:
        self.decode = TritonDecode()

    def plan(self, spans: Sequence[Span], pages: Tensor, page_size: int) -> MixedRows:
        """There is no whole to plan: the runtime plans the prompts."""
        raise TypeError("mixed steps are not planned as one; give the batch a MixedRows")

    def run(self, plan: MixedRows, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """As in `AttentionBackend`. What padding gets is finite: it is written to the padding page like any key."""
        out = torch.zeros_like(query)
        count = len(plan.singles.rows)
        if count:
            self.decode.run(plan.singles, query[:count], keys, values, scale, out[:count])
        plan.prompts.run(None, query[count:], keys, values, scale, out[count:])
        return out
