"""The Triton attention over rows of any lengths against plain torch, in float32, and its planners."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tandem.engine_core.attention.base import LayerAttention, Span
from tandem.engine_core.attention.torch import TorchPlanner
from tandem.engine_core.attention.triton import (
    DecodeStep,
    MixedStep,
    RaggedGraphPlanner,
    RaggedPlanner,
    max_graph_tiles,
    max_tiles,
)
from tandem.engine_core.kernels.attention import paged_prefill as kernel
from tandem.engine_core.kernels.attention.paged_prefill import choose_shape, choose_splits, paged_prefill, tile_queries
from tandem.engine_core.kernels.attention.split_counters import split_counters
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.kv_dtype import to_pool
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.paged_pool import HEAD_DIMS
from tandem.engine_core.kernels.reference import attention as reference
from tests.fakes.gpus import A100, L4, SUPPORTED
from tests.support.thinned import thinned

Work = Sequence[tuple[int, int]]
"""(start, length) per row."""
WORK: list[Work] = [
    [(0, 1)],
    [(0, 40)],
    [(17, 23), (0, 1), (70, 1), (0, 16), (15, 17)],
    [(30, 1), (31, 1), (32, 2)],
    [(60, 5)],
]
LAYER = LayerAttention(0.2)


class Inputs(NamedTuple):
    """Spans of a step, its query, the pool and the page table."""

    spans: list[Span]
    query: Tensor
    keys: Tensor
    values: Tensor
    page_table: PageTable


def spans_of(work: Work) -> list[Span]:
    spans, offset = [], 0
    for row, (start, length) in enumerate(work):
        spans.append(Span(row, offset, start, length))
        offset += length
    return spans


def inputs(
    work: Work,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    device: str,
    page_stride: int | None = None,
) -> Inputs:
    """Pages scattered, NaN in every slot without a token."""
    page_stride = page_stride or page_size
    spans = spans_of(work)
    ends = [span.start + span.length for span in spans]
    count = [-(-end // page_size) for end in ends]
    free = (torch.randperm(sum(count)) + 1).tolist()
    pages = torch.zeros(len(work), max(count), dtype=torch.int32)
    table = PageTable(pages, page_size, page_stride)
    keys, values = torch.full((2, (sum(count) + 1) * page_stride, kv_heads, head_dim), torch.nan).unbind(0)
    for row, (end, used) in enumerate(zip(ends, count, strict=True)):
        pages[row, :used] = torch.tensor([free.pop() for _ in range(used)])
        n = torch.arange(end)
        slots = table.slots(torch.full_like(n, row), n)
        for part in (keys, values):
            part[slots] = torch.randn(end, kv_heads, head_dim)
    # Padding reads slot 0 in the torch attention.
    keys[0], values[0] = 0.0, 0.0
    query = torch.randn(sum(span.length for span in spans), heads, head_dim)
    moved = [t.to(device) for t in (query, keys, values)]
    return Inputs(spans, *moved, PageTable(pages.to(device), page_size, page_stride))


def planner_for(heads: int, kv_heads: int, head_dim: int, spans: Sequence[Span], device: str) -> RaggedPlanner:
    """With no more capacity than those spans may need."""
    queries = tile_queries(heads, kv_heads, head_dim, torch.float32)
    tokens = sum(span.length for span in spans)

    def host(*shape: int) -> Tensor:
        return torch.full(shape, -9, dtype=torch.int32)

    return RaggedPlanner.allocate(host, torch.device(device), A100, queries, len(spans), tokens)


def assert_equals_the_oracle(work: Work, given: Inputs, layer: LayerAttention) -> None:
    spans, query, keys, values, table = given
    heads, kv_heads, head_dim = query.shape[1], keys.shape[1], query.shape[2]
    step = planner_for(heads, kv_heads, head_dim, spans, str(query.device)).plan(spans, [table])
    expected = reference.paged_prefill(query, keys, values, work, table, layer.scale, layer.window, layer.softcap)
    torch.testing.assert_close(step.run(query, keys, values, layer), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("work", "shape"),
    thinned(
        WORK,
        [
            (4, 2, 32, 4),
            (3, 1, 64, 16),
            (2, 2, 128, 32),
            (7, 1, 32, 1),
            (32, 1, 32, 16),
            (2, 1, 256, 128),
            (4, 2, 96, 8),
        ],
    ),
    ids=str,
)
def test_rows_of_any_lengths_equal_the_oracle(work: Work, shape: tuple[int, int, int, int], device: str) -> None:
    """`shape` is the number of heads and of K/V heads, the head dimension and the page size."""
    assert_equals_the_oracle(work, inputs(work, *shape, device), LAYER)


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_pages_apart_in_the_pool_equal_the_oracle(page_size: int, device: str) -> None:
    """A page of one layer is followed by those of the others before the next page begins."""
    work = WORK[2]
    assert_equals_the_oracle(work, inputs(work, 4, 2, 32, page_size, device, page_stride=6 * page_size), LAYER)


@pytest.mark.parametrize(("work", "window"), thinned(WORK, [1, 3, 15, 16, 17, 32, 40, 200]), ids=str)
def test_a_window_equals_the_oracle(work: Work, window: int, device: str) -> None:
    """Contexts shorter and longer than the window, with its lower edge at and next to those of tiles and pages."""
    assert_equals_the_oracle(work, inputs(work, 4, 2, 32, 8, device), LayerAttention(0.2, window))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_a_soft_cap_equals_the_oracle(softcap: float, window: int | None, device: str) -> None:
    work = WORK[2]
    given = inputs(work, 4, 2, 32, 8, device)
    layer = LayerAttention(0.2, window, softcap)
    assert_equals_the_oracle(work, given._replace(query=given.query * 5), layer)


def test_heads_of_256_with_a_window_and_a_soft_cap_equal_the_oracle(device: str) -> None:
    """The local layers of Gemma 2 have all three."""
    work: Work = [(0, 20), (37, 5)]
    assert_equals_the_oracle(work, inputs(work, 4, 2, 256, 16, device), LayerAttention(0.2, 17, 50.0))


def test_a_window_reads_no_key_outside_it(device: str) -> None:
    """Pages before a window may be freed: neither their keys nor their ids are read any more."""
    spans, query, keys, values, table = inputs([(60, 9)], 2, 1, 32, 8, device)
    layer = LayerAttention(0.2, 20)
    step = planner_for(2, 1, 32, spans, device).plan(spans, [table])
    expected = step.run(query, keys, values, layer)
    n = torch.arange(41, device=device)
    slots = table.slots(torch.zeros_like(n), n)
    keys[slots], values[slots] = torch.nan, torch.nan
    table.pages[0, : 41 // 8] = 0
    assert torch.equal(step.run(query, keys, values, layer), expected)


@pytest.mark.parametrize(
    ("work", "splits", "layer"),
    thinned(
        [[(0, 40)], [(60, 5), (90, 17)], [(17, 23), (0, 1), (120, 2)]],
        [2, 5, 16],
        [LAYER, LayerAttention(0.2, 1), LayerAttention(0.2, 30), LayerAttention(0.2, 30, 2.0)],
    ),
    ids=str,
)
def test_programs_that_share_a_tile_equal_the_oracle(
    work: Work, splits: int, layer: LayerAttention, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some splits see none of a query's keys; unused tiles lie between used ones."""
    monkeypatch.setattr(kernel, "MIN_SPLIT_POSITIONS", 16)
    spans, query, keys, values, table = inputs(work, 6, 2, 32, 4, device)
    tiles = planner_for(6, 2, 32, spans, device).plan(spans, [table]).tiles
    idle = torch.zeros_like(tiles)
    tiles = torch.stack((idle, tiles), 1).flatten(0, 1).contiguous()
    out = torch.full_like(query, torch.nan)
    band = {"window": layer.window, "softcap": layer.softcap}
    found = paged_prefill(query, keys, values, tiles, table, layer.scale, splits, **band, out=out)
    assert found is out
    expected = reference.paged_prefill(query, keys, values, work, table, layer.scale, **band)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert not split_counters("paged_prefill", query.device).any(), "the last program resets its counter to zero"


@pytest.mark.parametrize("decoding", [0, 3])
@pytest.mark.parametrize(
    "layer", [LAYER, LayerAttention(0.2, 20), LayerAttention(0.3, 7, 2.0)], ids=["full", "window", "window, soft cap"]
)
def test_a_mixed_step_equals_the_oracle(layer: LayerAttention, decoding: int, device: str) -> None:
    """Decode rows of any context, then longer rows, then padding, whose results are unchanged."""
    work = [*[(40, 1), (5, 1), (16, 1)][:decoding], (17, 23), (0, 9)]
    spans, query, keys, values, table = inputs(work, 4, 2, 32, 8, device)
    prompts = [Span(span.row, span.offset - decoding, span.start, span.length) for span in spans[decoding:]]
    ragged = planner_for(4, 2, 32, prompts, device)
    graph = RaggedGraphPlanner.build(ragged, len(ragged.tiles), 2, [table])
    graph.plan(prompts)
    positions = torch.tensor([start for start, _ in work[:decoding]], dtype=torch.int32, device=device)
    decode = DecodeStep(torch.arange(decoding, dtype=torch.int32, device=device), positions, [table], 2, A100)
    out = torch.full((len(query) + 2, *query.shape[1:]), 7.0, device=device)
    padded = torch.cat((query, torch.zeros(2, *query.shape[1:], device=device)))
    found = MixedStep(decode, graph.step, out).run(padded, keys, values, layer)
    expected = reference.paged_prefill(query, keys, values, work, table, layer.scale, layer.window, layer.softcap)
    torch.testing.assert_close(found[:-2], expected, atol=2e-5, rtol=2e-5)
    assert (found[-2:] == 7).all()


def test_splits_fill_the_device_and_no_more() -> None:
    assert [choose_splits(tiles, 8, 132) for tiles in (1, 4, 8, 16, 33, 34, 1000)] == [33, 9, 5, 3, 1, 1, 1]


def test_a_strided_pool_and_a_query_inside_a_projection_change_nothing(device: str) -> None:
    spans, query, keys, values, table = inputs([(3, 9)], 2, 1, 32, 4, device)
    pool = torch.stack((keys, values), 1)
    wide = torch.cat((query, query), 1)[:, :2]
    step = planner_for(2, 1, 32, spans, device).plan(spans, [table])
    found = step.run(wide, pool[:, 0], pool[:, 1], LAYER)
    torch.testing.assert_close(found, step.run(query, keys, values, LAYER), atol=1e-6, rtol=1e-6)


def test_tiles_cover_every_query_once(device: str) -> None:
    work: Work = [(5, 1), (0, 33), (16, 16), (2, 17)]
    spans = spans_of(work)
    ragged = planner_for(2, 1, 32, spans, device)
    tiles = ragged.plan(spans, [PageTable(torch.zeros(4, 3, dtype=torch.int32, device=device), 16, 16)]).tiles
    covered = []
    for row, first, position, left in tiles.tolist():
        span = spans[row]
        assert position - span.start == first - span.offset == span.length - left
        covered += range(first, first + min(left, ragged.queries))
    assert covered == list(range(67))


def test_a_graph_does_not_compute_tiles_of_earlier_steps(device: str) -> None:
    table = PageTable(torch.zeros(3, 3, dtype=torch.int32, device=device), 16, 16)
    ragged = planner_for(2, 1, 32, spans_of([(0, 33), (16, 16), (2, 17)]), device)
    ragged.plan(spans_of([(0, 33), (16, 16), (2, 17)]), [table])
    graph = RaggedGraphPlanner.build(ragged, len(ragged.tiles), 1, [table])
    graph.plan(spans_of([(5, 9)]))
    assert ragged.tiles[:2].tolist() == [[0, 0, 5, 9], [0, 8, 13, 1]]
    assert not ragged.tiles[2:].any()
    graph.plan([])
    assert not ragged.tiles.any()


@given(st.lists(st.integers(2, 90), min_size=1, max_size=12), st.integers(1, 70), st.integers(0, 9), st.integers(0, 99))
def test_a_graph_has_tiles_for_every_step_that_it_takes(
    lengths: list[int], queries: int, more_rows: int, more_tokens: int
) -> None:
    rows, tokens = len(lengths) + more_rows, sum(lengths) + more_tokens
    needed = sum(-(-length // queries) for length in lengths)
    assert needed <= max_graph_tiles(rows, tokens, queries) <= max_tiles(rows, tokens, queries)


def test_a_step_without_tiles_is_empty(device: str) -> None:
    query, pool = torch.zeros(0, 2, 32, device=device), torch.zeros(4, 1, 32, device=device)
    tiles = torch.zeros(0, 4, dtype=torch.int32, device=device)
    assert paged_prefill(query, pool, pool, tiles, PageTable(tiles, 4, 4), 1.0).shape == (0, 2, 32)


def test_many_tiles_fit_a_grid(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """CUDA allows more than 65,535 programs in the first dimension alone."""
    grids = []

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *_arguments, **_options: None

    monkeypatch.setattr("tandem.engine_core.kernels.attention.paged_prefill._paged_prefill_kernel", Launch())
    query, pool = torch.zeros(70_000, 2, 32, device=device), torch.zeros(4, 2, 32, device=device)
    tiles = torch.zeros(70_000, 4, dtype=torch.int32, device=device)
    paged_prefill(query, pool, pool, tiles, PageTable(tiles, 4, 4), 1.0)
    assert grids == [(70_000, 2, 1)]


def test_large_scores_do_not_overflow(device: str) -> None:
    spans, query, keys, values, table = inputs([(0, 20)], 2, 1, 32, 4, device)
    # Multiples of a thousand: different scores differ by far more than their rounding.
    query, keys, layer = query.round() * 1e3, keys.round(), LayerAttention(1.0)
    found = planner_for(2, 1, 32, spans, device).plan(spans, [table]).run(query, keys, values, layer)
    expected = TorchPlanner([layer]).plan(spans, [table]).run(query, keys, values, layer)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype", "queries"),
    [(32, 8, torch.bfloat16, 16), (6, 1, torch.bfloat16, 8), (1, 1, torch.bfloat16, 64), (64, 1, torch.float32, 1)],
)
def test_a_tile_holds_whole_groups(heads: int, kv_heads: int, dtype: torch.dtype, queries: int) -> None:
    assert tile_queries(heads, kv_heads, 64, dtype) == queries


def test_tile_shapes_depend_on_head_dim_and_dtype() -> None:
    assert choose_shape(256, torch.bfloat16).positions < choose_shape(128, torch.bfloat16).positions
    assert choose_shape(64, torch.float32).stages == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("gpu", SUPPORTED, ids=lambda gpu: gpu.name)
def test_shapes_fit_every_gpu_as_measured(gpu: GpuTraits, dtype: torch.dtype) -> None:
    for head_dim in HEAD_DIMS:
        for heads in (1, 8, 64):
            query, keys = torch.empty(1, heads, head_dim).bfloat16(), torch.empty(1, 1, head_dim).to(dtype)
            shape = choose_shape(head_dim, torch.bfloat16)
            assert kernel.fit_shape(shape, query, keys, gpu) == shape


def test_a_shape_that_does_not_fit_gets_fewer_stages() -> None:
    query, keys = torch.empty(1, 128, 256).bfloat16(), torch.empty(1, 1, 256).bfloat16()
    shape = choose_shape(256, torch.bfloat16)
    assert [kernel.fit_shape(shape, query, keys, gpu).stages for gpu in (A100, L4)] == [2, 1]


@pytest.mark.parametrize(
    ("head_dim", "page_size", "words", "message"),
    [(48, 4, 4, "head_dim 48"), (32, 3, 4, "pages of 3"), (32, 0, 4, "pages of 0"), (32, 4, 3, "tiles")],
)
def test_shapes_without_a_kernel_are_refused(
    head_dim: int, page_size: int, words: int, message: str, device: str
) -> None:
    query, pool = torch.zeros(1, 1, head_dim, device=device), torch.zeros(4, 1, head_dim, device=device)
    tiles = torch.zeros(1, words, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=message):
        paged_prefill(query, pool, pool, tiles, PageTable(tiles, page_size, page_size), 1.0)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("pair", [None, (0.02, 30.0)], ids=["no scales", "scales"])
def test_a_pool_of_8_bit_floats_is_read_exactly(pair: tuple[float, float] | None, splits: int, device: str) -> None:
    spans, query, keys, values, table = inputs([(17, 23), (4, 1)], 4, 2, 32, 16, device)
    keys, values = (to_pool(part.nan_to_num(), torch.float8_e4m3fn) for part in (keys, values))
    key_scale, value_scale = pair or (1.0, 1.0)
    scales = None if pair is None else torch.tensor(pair, device=device)
    plain = TorchPlanner([LAYER]).plan(spans, [table])
    expected = plain.run(query, keys.float() * key_scale, values.float() * value_scale, LAYER)
    step = replace(planner_for(4, 2, 32, spans, device).plan(spans, [table]), splits=splits)
    for tolerance, one in ((2e-5, step), (1e-6, plain)):
        found = one.run(query * key_scale, keys, values, LAYER, scales)
        torch.testing.assert_close(found, expected, atol=tolerance * value_scale, rtol=tolerance)
