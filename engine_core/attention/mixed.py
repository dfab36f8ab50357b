"""Attention of steps that hold both: single tokens as in decode, and the tokens of prompts.

A ragged kernel would take a whole tile of queries for each single token and read its keys once a query head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine_core.attention.base import Span
from engine_core.attention.triton import DecodeRows, TritonDecode


class PromptAttention(Protocol):
    """Attention of rows of several tokens that a graph can hold, and that is planned anew for each step."""

    def plan(self, spans: Sequence[Span], pages: Tensor, page_size: int) -> None:
        """As in `AttentionBackend`, into memory that the graph reads."""

    def run(
        self, plan: None, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor | None = None
    ) -> Tensor:
        """As in `AttentionBackend`. out: where to write, shaped like query."""


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
