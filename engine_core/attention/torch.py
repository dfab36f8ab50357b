"""Attention in plain torch: the CPU's backend, and what other backends are compared with.

Neighbouring rows of length 1 form one batch, padded to the longest; a longer row is attended to by itself. Grouped
queries (Ainslie et al., 2023) never copy a key: for one position the queries of a group stand in the place of
positions, for several a stride of 0 repeats the key head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.attention.base import Span
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.kv_dtype import read_pool


@dataclass(frozen=True, slots=True)
class SingleQueries:
    """Neighbouring rows of one query each."""

    offset: int
    rows: int
    longest: int
    places: Tensor
    """[rows * longest] int64, where keys are in the pool; padding is place 0, so that no row touches another's."""
    mask: Tensor | None
    """[rows, 1, 1, longest] bool, True at real keys; None without padding."""

    def run(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        kv_heads, head_dim = keys.shape[1:]
        shape = (self.rows, self.longest, kv_heads, head_dim)
        k = read_pool(keys, self.places, query.dtype).view(shape).transpose(1, 2)
        v = read_pool(values, self.places, query.dtype).view(shape).transpose(1, 2)
        # [rows, kv_heads, group, head_dim]: all queries of a group see the same keys, so they pass as positions.
        q = query.reshape(self.rows, kv_heads, -1, head_dim)
        return functional.scaled_dot_product_attention(q, k, v, self.mask, scale=scale).reshape(query.shape)


@dataclass(frozen=True, slots=True)
class QueryRun:
    """One row of several queries."""

    offset: int
    rows: int
    """How many queries it has."""
    places: Tensor
    """[keys] int64, where its keys are in the pool."""
    mask: Tensor | None
    """[rows, keys] bool, True where a query sees a key; None if the row starts at position 0."""

    def run(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        kv_heads, head_dim = keys.shape[1:]
        # The key heads stand in the place of a batch, the queries of a group in the place of heads.
        q = query.reshape(self.rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        shape = (kv_heads, q.shape[1], -1, head_dim)
        k = read_pool(keys, self.places, query.dtype).transpose(0, 1).unsqueeze(1).expand(shape)
        v = read_pool(values, self.places, query.dtype).transpose(0, 1).unsqueeze(1).expand(shape)
        causal = self.mask is None
        out = functional.scaled_dot_product_attention(q, k, v, self.mask, is_causal=causal, scale=scale)
        return out.permute(2, 0, 1, 3).reshape(query.shape)


Part = SingleQueries | QueryRun


class TorchAttention:
    """The `AttentionBackend` of every device that has torch."""

    def plan(self, spans: Sequence[Span], pages: Tensor, page_size: int) -> tuple[Part, ...]:
        """As in `AttentionBackend`. The spans are in the order of the step's tokens and leave no gap."""
        offsets = torch.arange(page_size, device=pages.device)
        pages = pages[[span.row for span in spans]]
        parts: list[Part] = []
        first = 0
        while first < len(spans):
            last = first + 1
            if spans[first].length == 1:
                while last < len(spans) and spans[last].length == 1:
                    last += 1
                parts.append(_single_queries(spans[first:last], pages[first:last], offsets))
            else:
                parts.append(_query_run(spans[first], pages[first:last], offsets))
            first = last
        return tuple(parts)

    def run(self, plan: tuple[Part, ...], query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """As in `AttentionBackend`."""
        if len(plan) == 1:
            return plan[0].run(query, keys, values, scale)
        outputs = [part.run(query[part.offset : part.offset + part.rows], keys, values, scale) for part in plan]
        return torch.cat(outputs) if outputs else query


def _places(pages: Tensor, offsets: Tensor, count: int) -> Tensor:
    """Places of the first `count` positions of each row of a page table. [rows, count] int64."""
    used = ceil_div(count, offsets.shape[0])
    places = pages[:, :used].unsqueeze(-1) * offsets.shape[0] + offsets
    return places.flatten(1)[:, :count]


def _single_queries(spans: Sequence[Span], pages: Tensor, offsets: Tensor) -> SingleQueries:
    lengths = [span.start + 1 for span in spans]
    longest = max(lengths)
    places = _places(pages, offsets, longest)
    mask = None
    if min(lengths) < longest:
        mask = torch.ones(len(spans), longest, dtype=torch.bool, device=pages.device)
        for row, length in enumerate(lengths):
            mask[row, length:] = False
        places = torch.where(mask, places, 0)
        mask = mask[:, None, None, :]
    return SingleQueries(spans[0].offset, len(spans), longest, places.flatten(), mask)


def _query_run(span: Span, pages: Tensor, offsets: Tensor) -> QueryRun:
    count = span.start + span.length
    mask = None
    if span.start > 0:
        mask = torch.ones(span.length, count, dtype=torch.bool, device=pages.device).tril_(span.start)
    return QueryRun(span.offset, span.length, _places(pages, offsets, count).flatten(), mask)
