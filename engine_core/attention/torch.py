"""Attention in plain torch, for the CPU and as a reference.

Adjacent single-query rows form one batch, padded to the longest; a longer row is computed alone. Grouped-query
attention (Ainslie et al., 2023) never copies a key: with one query per row the queries of a group are passed as
positions, with several a stride of 0 repeats the key head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.attention.base import LayerAttention, Span
from tandem.engine_core.kernels.kv_dtype import read_pool
from tandem.engine_core.kernels.page_table import PageTable

FEW_QUERIES = 8
"""Largest number of queries of a row that may be drafts to verify."""


@dataclass(frozen=True, slots=True)
class SingleQueries:
    """Adjacent rows with one query each."""

    offset: int
    """Index of the first query among the step's tokens."""
    count: int
    """Number of queries, one per row."""
    longest: int
    """Number of keys per row after padding."""
    slots: Tensor
    """[count * longest] int64, slots of the keys; padding repeats the row's newest key, so no row reads another's keys,
    or NaN that it does not see: `scaled_dot_product_attention` adds -inf to masked scores, and NaN stays NaN."""
    mask: Tensor | None
    """[count, 1, 1, longest] bool, True for visible keys; None if all are visible."""

    def run(self, query: Tensor, keys: Tensor, values: Tensor, layer: LayerAttention) -> Tensor:
        """Attend with the queries of these rows.

        query: [count, heads, head_dim]; other arguments are as in `AttentionStep.run`.
        """
        kv_heads, head_dim = keys.shape[1:]
        shape = (self.count, self.longest, kv_heads, head_dim)
        k = read_pool(keys, self.slots, query.dtype).view(shape).transpose(1, 2)
        v = read_pool(values, self.slots, query.dtype).view(shape).transpose(1, 2)
        # [count, kv_heads, group, head_dim]: all queries of a group see the same keys, so pass them as positions.
        q = query.reshape(self.count, kv_heads, -1, head_dim)
        return _attend(q, k, v, self.mask, False, layer).reshape(query.shape)


@dataclass(frozen=True, slots=True)
class QueryRun:
    """One row with several queries."""

    offset: int
    """Index of the first query among the step's tokens."""
    count: int
    """Number of queries."""
    slots: Tensor
    """[keys] int64, slots of the keys visible to any of the queries."""
    mask: Tensor | None
    """[count, keys] bool, True for visible keys; None for a plain causal mask, where query i sees keys 0 to i."""

    def run(self, query: Tensor, keys: Tensor, values: Tensor, layer: LayerAttention) -> Tensor:
        """Attend with the queries of this row.

        query: [count, heads, head_dim]; other arguments are as in `AttentionStep.run`.
        """
        kv_heads, head_dim = keys.shape[1:]
        # Key heads become the batch dimension, and the queries of a group become heads.
        q = query.reshape(self.count, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        k = read_pool(keys, self.slots, query.dtype).transpose(0, 1)
        v = read_pool(values, self.slots, query.dtype).transpose(0, 1)
        if self.count <= FEW_QUERIES:
            attended = _attend_apart(q, k, v, self.mask, layer)
        else:
            k, v = (each.unsqueeze(1).expand(kv_heads, q.shape[1], -1, head_dim) for each in (k, v))
            attended = _attend(q, k, v, self.mask, self.mask is None, layer)
        return attended.permute(2, 0, 1, 3).reshape(query.shape)


Part = SingleQueries | QueryRun


@dataclass(frozen=True, slots=True)
class TorchStep:
    """An `AttentionStep` that computes its parts sequentially."""

    parts: dict[tuple[int, int | None], tuple[Part, ...]]
    """Parts of the step by the layer's KV group and window, in the order of the step's tokens."""

    def run(
        self, query: Tensor, keys: Tensor, values: Tensor, layer: LayerAttention, scales: Tensor | None = None
    ) -> Tensor:
        """Implement `AttentionStep.run`."""
        parts = self.parts[layer.group, layer.window]
        outputs = [part.run(query[part.offset : part.offset + part.count], keys, values, layer) for part in parts]
        if not outputs:
            return query
        attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return attended if scales is None else attended * scales[1]


class TorchPlanner:
    """An `AttentionPlanner` for any device that torch supports."""

    def __init__(self, kinds: Sequence[LayerAttention]) -> None:
        """Store the distinct kinds of attention among the model's layers."""
        self.kinds = kinds

    def plan(self, spans: Sequence[Span], page_tables: Sequence[PageTable]) -> TorchStep:
        """Implement `AttentionPlanner.plan`, once for each KV group and window of its layers."""
        kinds = {(kind.group, kind.window) for kind in self.kinds}
        return TorchStep({(group, window): _parts(spans, page_tables[group], window) for group, window in kinds})


def _parts(spans: Sequence[Span], page_table: PageTable, window: int | None) -> tuple[Part, ...]:
    """Group the spans into parts."""
    parts: list[Part] = []
    first = 0
    while first < len(spans):
        last = first + 1
        if spans[first].length == 1:
            while last < len(spans) and spans[last].length == 1:
                last += 1
            parts.append(_single_queries(spans[first:last], page_table, window))
        else:
            parts.append(_query_run(spans[first], page_table, window))
        first = last
    return tuple(parts)


def _first_key(start: int, window: int | None) -> int:
    """Return the lowest position visible to a query at `start`."""
    return 0 if window is None else max(0, start + 1 - window)


def _single_queries(spans: Sequence[Span], page_table: PageTable, window: int | None) -> SingleQueries:
    ends = [span.start + 1 for span in spans]
    firsts = [_first_key(span.start, window) for span in spans]
    lowest, longest = min(firsts), max(ends)
    slots = page_table.slots_between([span.row for span in spans], lowest, longest)
    mask = None
    if min(ends) < longest or max(firsts) > lowest:
        mask = torch.ones(slots.shape, dtype=torch.bool, device=slots.device)
        for row, (first, end) in enumerate(zip(firsts, ends, strict=True)):
            for hidden in (slice(first - lowest), slice(end - lowest, None)):
                mask[row, hidden] = False
                slots[row, hidden] = slots[row, end - 1 - lowest]
        mask = mask[:, None, None, :]
    return SingleQueries(spans[0].offset, len(spans), longest - lowest, slots.flatten(), mask)


def _query_run(span: Span, page_table: PageTable, window: int | None) -> QueryRun:
    lowest, end = _first_key(span.start, window), span.start + span.length
    slots = page_table.slots_between([span.row], lowest, end).flatten()
    mask = None
    if span.start > 0 or (window is not None and window < span.length):
        mask = torch.ones(span.length, end - lowest, dtype=torch.bool, device=slots.device)
        mask.tril_(span.start - lowest)
        if window is not None:
            mask.triu_(span.start - lowest - window + 1)
    return QueryRun(span.offset, span.length, slots, mask)


def _attend_apart(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, layer: LayerAttention) -> Tensor:
    """Attend like `_attend`, but a query gets no NaN from the key of a later token, which may be a wrong draft.

    q: [kv_heads, group, queries, head_dim]; k, v: [kv_heads, keys, head_dim]; mask: [queries, keys], None for a plain
    causal one.
    """
    scores = (q.flatten(1, 2).float() @ k.float().transpose(1, 2)).view(*q.shape[:3], -1) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
    weights = scores.masked_fill_(~mask, -torch.inf).softmax(-1).to(v.dtype)
    return (weights.flatten(1, 2) @ v).view(q.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, layer: LayerAttention) -> Tensor:
    """Attend with queries [..., queries, head_dim] to keys [..., keys, head_dim].

    mask: broadcast to [..., queries, keys], True where a query sees a key; causal: query i sees keys 0 to i instead.
    """
    if layer.softcap is None:
        return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=layer.scale)
    scores = (q @ k.transpose(-1, -2)).float() * layer.scale
    scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v
