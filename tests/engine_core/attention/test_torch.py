"""The torch attention against dense attention computed row by row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.engine_core.attention.base import LayerAttention, Span
from tandem.engine_core.attention.torch import TorchPlanner
from tandem.engine_core.kernels.page_table import PageTable
from tests.support.effort import EFFORT

FULL = LayerAttention(0.3)


def dense(query: Tensor, keys: Tensor, values: Tensor, start: int, layer: LayerAttention) -> Tensor:
    """query: [n, heads, d] at positions from start on; keys, values: [start + n, kv_heads, d]. In float64."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (pool.double().repeat_interleave(group, 1) for pool in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    age = start + torch.arange(query.shape[0])[:, None] - torch.arange(keys.shape[0])
    seen = (age >= 0) & (age < (layer.window or keys.shape[0]))
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def spread(pool: Tensor, pages: list[int], page_size: int, page_stride: int) -> Tensor:
    return torch.cat([pool[page * page_stride : page * page_stride + page_size] for page in pages])


@settings(max_examples=60 * EFFORT, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 21), st.integers(1, 9)), min_size=1, max_size=6),
    decodes=st.lists(st.integers(0, 30), max_size=5),
    page_size=st.sampled_from([1, 2, 4, 16]),
    further_stride=st.sampled_from([0, 5]),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 4]),
    windows=st.lists(st.sampled_from([None, 1, 2, 4, 7, 16, 40]), min_size=1, max_size=3, unique=True),
    softcap=st.sampled_from([None, 0.5, 20.0]),
    seed=st.integers(0, 1000),
)
def test_rows_of_any_lengths_equal_dense_attention(
    shapes: list[tuple[int, int]],
    decodes: list[int],
    page_size: int,
    further_stride: int,
    kv_heads: int,
    group: int,
    windows: list[int | None],
    softcap: float | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = shapes + [(start, 1) for start in decodes]
    rows = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
    head_dim, page_stride = 8, page_size + further_stride
    need = [-(-(start + length) // page_size) for start, length in rows]
    total = sum(need) + 1
    pool = torch.randn(2, total * page_stride, kv_heads, head_dim, generator=generator)
    keys, values = pool.unbind(0)
    order = (torch.randperm(total - 1, generator=generator) + 1).split(need)
    pages = torch.zeros(len(rows), max(need), dtype=torch.int32)
    spans, offset = [], 0
    for row, (start, length) in enumerate(rows):
        pages[row, : need[row]] = order[row]
        spans.append(Span(row, offset, start, length))
        offset += length
    query = torch.randn(offset, kv_heads * group, head_dim, generator=generator)
    layers = [LayerAttention(0.3, window, softcap) for window in windows]
    step = TorchPlanner(layers).plan(spans, [PageTable(pages, page_size, page_stride)])
    for layer in layers:
        found = step.run(query, keys, values, layer)
        assert found.shape == query.shape
        for row, span in enumerate(spans):
            count = span.start + span.length
            own = [spread(part, order[row].tolist(), page_size, page_stride)[:count] for part in (keys, values)]
            part = slice(span.offset, span.offset + span.length)
            expected = dense(query[part], own[0], own[1], span.start, layer)
            torch.testing.assert_close(found[part].double(), expected, atol=2e-6, rtol=0)


def test_a_step_without_rows_returns_its_empty_query() -> None:
    step = TorchPlanner([FULL]).plan([], [PageTable(torch.zeros(0, 1, dtype=torch.int32), 4, 4)])
    query = torch.zeros(0, 4, 8)
    assert step.run(query, torch.zeros(4, 2, 8), torch.zeros(4, 2, 8), FULL).shape == query.shape


def test_adjacent_decode_rows_form_one_part() -> None:
    spans = [Span(0, 0, 3, 1), Span(1, 1, 9, 1), Span(2, 2, 0, 4), Span(3, 6, 5, 1)]
    step = TorchPlanner([FULL]).plan(spans, [PageTable(torch.ones(4, 3, dtype=torch.int32), 4, 4)])
    assert [(part.offset, part.count) for part in step.parts[0, None]] == [(0, 2), (2, 4), (6, 1)]


def test_layers_of_one_window_share_their_parts() -> None:
    layers = [LayerAttention(0.3, 4), LayerAttention(0.5, 4, 20.0, rotary=1), LayerAttention(0.3)]
    step = TorchPlanner(layers).plan([Span(0, 0, 3, 1)], [PageTable(torch.ones(1, 3, dtype=torch.int32), 4, 4)])
    assert step.parts.keys() == {(0, 4), (0, None)}


def test_a_window_reads_no_key_before_it() -> None:
    """The decode rows of a step read from the lowest position visible to any of them."""
    spans = [Span(0, 0, 30, 1), Span(1, 1, 25, 1)]
    step = TorchPlanner([LayerAttention(0.3, 8)]).plan(spans, [PageTable(torch.ones(2, 8, dtype=torch.int32), 4, 4)])
    (part,) = step.parts[0, 8]
    assert len(part.slots) == 2 * (31 - 18)


def test_bfloat16_stays_close_to_dense_attention() -> None:
    torch.manual_seed(0)
    layer = LayerAttention(0.5)
    keys, values = torch.randn(2, 32, 2, 8).bfloat16().unbind(0)
    spans = [Span(0, 0, 6, 1), Span(1, 1, 2, 1), Span(2, 2, 3, 5)]
    pages = torch.tensor([[1, 2], [3, 0], [4, 5]], dtype=torch.int32)
    query = torch.randn(7, 4, 8).bfloat16()
    found = TorchPlanner([layer]).plan(spans, [PageTable(pages, 4, 4)]).run(query, keys, values, layer)
    assert found.dtype == torch.bfloat16
    expected = dense(query[2:], spread(keys, [4, 5], 4, 4), spread(values, [4, 5], 4, 4), 3, layer)
    torch.testing.assert_close(found[2:].double(), expected, atol=2e-2, rtol=0)


@pytest.mark.parametrize("layer", [FULL, LayerAttention(0.3, window=4), LayerAttention(0.3, softcap=2.0)])
@pytest.mark.parametrize("start", [0, 9])
def test_keys_of_wrong_drafts_change_no_earlier_query_and_no_other_row(start: int, layer: LayerAttention) -> None:
    """Drafts without usable values have NaN keys (`rope_and_kv_write`), and missing ones are written to page 0."""
    torch.manual_seed(0)
    spans = [Span(0, 0, start, 4), Span(1, 4, 2, 1), Span(2, 5, 14, 1)]
    pages = torch.tensor([[1, 2, 3, 4], [5, 0, 0, 0], [6, 7, 8, 9]], dtype=torch.int32)
    step, query = TorchPlanner([layer]).plan(spans, [PageTable(pages, 4, 4)]), torch.randn(6, 4, 8)
    keys, values = torch.randn(2, 40, 2, 8)
    expected = step.run(query, keys, values, layer)
    draft = int(pages[0, (start + 2) // 4]) * 4 + (start + 2) % 4
    keys[[0, draft]], values[[0, draft]] = torch.nan, 0.0
    found, is_later = step.run(query, keys, values, layer), [False, False, True, True, False, False]
    assert torch.equal(found.isnan().any(-1).any(-1), torch.tensor(is_later))
    assert torch.equal(found[[0, 1, 4, 5]], expected[[0, 1, 4, 5]])
