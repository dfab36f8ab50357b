"""The torch backend against dense attention written out row by row."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.engine_core.attention.base import Span
from tandem.engine_core.attention.torch import TorchAttention


def dense(query: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """query: [n, heads, d] at positions from start on; keys, values: [start + n, kv_heads, d]. In float64."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (pool.double().repeat_interleave(group, 1) for pool in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    for position in range(query.shape[0]):
        scores[:, position, start + position + 1 :] = -torch.inf
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def spread(pool: Tensor, pages: list[int], page_size: int) -> Tensor:
    return torch.cat([pool[page * page_size : (page + 1) * page_size] for page in pages])


@settings(max_examples=120, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 21), st.integers(1, 9)), min_size=1, max_size=6),
    decodes=st.lists(st.integers(0, 30), max_size=5),
    page_size=st.sampled_from([1, 2, 4, 16]),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 1000),
)
def test_equals_dense(
    shapes: list[tuple[int, int]], decodes: list[int], page_size: int, kv_heads: int, group: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = shapes + [(start, 1) for start in decodes]
    rows = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
    head_dim = 8
    need = [-(-(start + length) // page_size) for start, length in rows]
    total = sum(need) + 1
    pool = torch.randn(2, total * page_size, kv_heads, head_dim, generator=generator)
    keys, values = pool.unbind(0)
    order = (torch.randperm(total - 1, generator=generator) + 1).split(need)
    pages = torch.zeros(len(rows), max(need), dtype=torch.int32)
    spans, offset = [], 0
    for row, (start, length) in enumerate(rows):
        pages[row, : need[row]] = order[row]
        spans.append(Span(row, offset, start, length))
        offset += length
    query = torch.randn(offset, kv_heads * group, head_dim, generator=generator)
    backend = TorchAttention()
    found = backend.run(backend.plan(spans, pages, page_size), query, keys, values, 0.3)
    assert found.shape == query.shape
    for row, span in enumerate(spans):
        count = span.start + span.length
        own = [spread(part, order[row].tolist(), page_size)[:count] for part in (keys, values)]
        part = slice(span.offset, span.offset + span.length)
        expected = dense(query[part], own[0], own[1], span.start, 0.3)
        torch.testing.assert_close(found[part].double(), expected, atol=2e-6, rtol=0)


def test_no_rows() -> None:
    backend = TorchAttention()
    plan = backend.plan([], torch.zeros(0, 1, dtype=torch.int32), 4)
    query = torch.zeros(0, 4, 8)
    assert backend.run(plan, query, torch.zeros(4, 2, 8), torch.zeros(4, 2, 8), 1.0).shape == query.shape


def test_decode_rows_are_one_part() -> None:
    backend = TorchAttention()
    spans = [Span(0, 0, 3, 1), Span(1, 1, 9, 1), Span(2, 2, 0, 4), Span(3, 6, 5, 1)]
    parts = backend.plan(spans, torch.ones(4, 3, dtype=torch.int32), 4)
    assert [(part.offset, part.rows) for part in parts] == [(0, 2), (2, 4), (6, 1)]


def test_bfloat16() -> None:
    torch.manual_seed(0)
    backend = TorchAttention()
    keys, values = torch.randn(2, 32, 2, 8).bfloat16().unbind(0)
    spans = [Span(0, 0, 6, 1), Span(1, 1, 2, 1), Span(2, 2, 3, 5)]
    pages = torch.tensor([[1, 2], [3, 0], [4, 5]], dtype=torch.int32)
    query = torch.randn(7, 4, 8).bfloat16()
    found = backend.run(backend.plan(spans, pages, 4), query, keys, values, 0.5)
    assert found.dtype == torch.bfloat16
    expected = dense(query[2:], spread(keys, [4, 5], 4), spread(values, [4, 5], 4), 3, 0.5)
    torch.testing.assert_close(found[2:].double(), expected, atol=2e-2, rtol=0)
