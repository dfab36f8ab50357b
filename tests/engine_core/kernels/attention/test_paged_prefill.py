"""The Triton attention over rows of any lengths against plain torch, in float32, and the backend that plans for it."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tandem.engine_core.attention.base import Span
from tandem.engine_core.attention.torch import TorchAttention
from tandem.engine_core.attention.triton import TritonPrompts, TritonRagged, graph_tiles, most_tiles
from tandem.engine_core.kernels.attention import paged_prefill as kernel
from tandem.engine_core.kernels.attention.paged_prefill import choose_shape, choose_splits, paged_prefill, tile_queries
from tandem.engine_core.kernels.attention.split_counters import arrivals
from tandem.engine_core.kernels.kv_dtype import to_pool
from tandem.engine_core.kernels.reference import attention as reference

Work = Sequence[tuple[int, int]]
"""(start, length) a row."""
WORK: list[Work] = [
    [(0, 1)],
    [(0, 40)],
    [(17, 23), (0, 1), (70, 1), (0, 16), (15, 17)],
    [(30, 1), (31, 1), (32, 2)],
    [(60, 5)],
]


def spans_of(work: Work) -> list[Span]:
    spans, offset = [], 0
    for row, (start, length) in enumerate(work):
        spans.append(Span(row, offset, start, length))
        offset += length
    return spans


def inputs(
    work: Work, heads: int, kv_heads: int, head_dim: int, page_size: int, device: str
) -> tuple[list[Span], Tensor, Tensor, Tensor, Tensor]:
    """Spans, query, keys, values and pages: pages scattered, NaN wherever no row has a token."""
    spans = spans_of(work)
    ends = [span.start + span.length for span in spans]
    count = [-(-end // page_size) for end in ends]
    free = (torch.randperm(sum(count)) + 1).tolist()
    pages = torch.zeros(len(work), max(count), dtype=torch.int32)
    keys, values = torch.full((2, (sum(count) + 1) * page_size, kv_heads, head_dim), torch.nan).unbind(0)
    for row, (end, used) in enumerate(zip(ends, count, strict=True)):
        pages[row, :used] = torch.tensor([free.pop() for _ in range(used)])
        n = torch.arange(end)
        place = pages[row, n // page_size].long() * page_size + n % page_size
        for part in (keys, values):
            part[place] = torch.randn(end, kv_heads, head_dim)
    # Padding reads place 0 in the torch backend.
    keys[0], values[0] = 0.0, 0.0
    query = torch.randn(sum(span.length for span in spans), heads, head_dim)
    return spans, query.to(device), keys.to(device), values.to(device), pages.to(device)


def backend(heads: int, kv_heads: int, head_dim: int, spans: Sequence[Span], device: str) -> TritonRagged:
    """With no more room than those spans may need."""
    queries = tile_queries(heads, kv_heads, head_dim, torch.float32)
    tokens = sum(span.length for span in spans)

    def host(*shape: int) -> Tensor:
        return torch.full(shape, -9, dtype=torch.int32)

    return TritonRagged.allocate(host, torch.device(device), queries, len(spans), tokens)


@pytest.mark.parametrize("work", WORK, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [(4, 2, 32, 4), (3, 1, 64, 16), (2, 2, 128, 32), (7, 1, 32, 1), (32, 1, 32, 16), (2, 1, 256, 128)],
)
def test_equals_the_oracle(work: Work, heads: int, kv_heads: int, head_dim: int, page_size: int, device: str) -> None:
    spans, query, keys, values, pages = inputs(work, heads, kv_heads, head_dim, page_size, device)
    ragged = backend(heads, kv_heads, head_dim, spans, device)
    found = ragged.run(ragged.plan(spans, pages, page_size), query, keys, values, 0.2)
    expected = reference.paged_prefill(query, keys, values, work, pages, page_size, 0.2)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("splits", [2, 5, 16])
@pytest.mark.parametrize("work", [[(0, 40)], [(60, 5), (130, 33)], [(17, 23), (0, 1), (190, 2)]], ids=str)
def test_programs_that_share_a_tile_equal_the_oracle(
    work: Work, splits: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some see nothing of what a query may see; tiles without work lie between those with work."""
    monkeypatch.setattr(kernel, "LEAST", 16)
    spans, query, keys, values, pages = inputs(work, 6, 2, 32, 4, device)
    ragged = backend(6, 2, 32, spans, device)
    tiles = ragged.plan(spans, pages, 4).tiles
    idle = torch.zeros_like(tiles)
    tiles = torch.stack((idle, tiles), 1).flatten(0, 1).contiguous()
    out = torch.full_like(query, torch.nan)
    found = paged_prefill(query, keys, values, tiles, pages, 4, 0.2, splits, out=out)
    assert found is out
    expected = reference.paged_prefill(query, keys, values, work, pages, 4, 0.2)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert not arrivals("paged_prefill", query.device).any(), "counters return to zero by themselves"


def test_splits_fill_the_device_and_no_more() -> None:
    assert [choose_splits(tiles, 8, 132) for tiles in (1, 4, 8, 16, 33, 34, 1000)] == [33, 9, 5, 3, 1, 1, 1]


def test_a_pool_with_a_stride_and_a_query_inside_a_projection(device: str) -> None:
    spans, query, keys, values, pages = inputs([(3, 9)], 2, 1, 32, 4, device)
    pool = torch.stack((keys, values), 1)
    wide = torch.cat((query, query), 1)[:, :2]
    ragged = backend(2, 1, 32, spans, device)
    plan = ragged.plan(spans, pages, 4)
    found = ragged.run(plan, wide, pool[:, 0], pool[:, 1], 0.2)
    torch.testing.assert_close(found, ragged.run(plan, query, keys, values, 0.2), atol=1e-6, rtol=1e-6)


def test_tiles_cover_every_query_once(device: str) -> None:
    work: Work = [(5, 1), (0, 33), (16, 16), (2, 17)]
    spans = spans_of(work)
    ragged = backend(2, 1, 32, spans, device)
    tiles = ragged.plan(spans, torch.zeros(4, 3, dtype=torch.int32, device=device), 16).tiles
    covered = []
    for row, first, position, left in tiles.tolist():
        span = spans[row]
        assert position - span.start == first - span.offset == span.length - left
        covered += range(first, first + min(left, ragged.queries))
    assert covered == list(range(67))


def test_what_earlier_steps_left_is_no_work_of_a_smaller_one(device: str) -> None:
    pages = torch.zeros(3, 3, dtype=torch.int32, device=device)
    ragged = backend(2, 1, 32, spans_of([(0, 33), (16, 16), (2, 17)]), device)
    ragged.plan(spans_of([(0, 33), (16, 16), (2, 17)]), pages, 16)
    room = len(ragged.tiles)
    TritonPrompts(ragged, room, 1, pages, 16).plan(spans_of([(5, 9)]), pages, 16)
    assert ragged.tiles[:2].tolist() == [[0, 0, 5, 9], [0, 8, 13, 1]]
    assert not ragged.tiles[2:].any()
    TritonPrompts(ragged, room, 1, pages, 16).plan([], pages, 16)
    assert not ragged.tiles.any()


@given(st.lists(st.integers(2, 90), min_size=1, max_size=12), st.integers(1, 70), st.integers(0, 9), st.integers(0, 99))
def test_a_graph_has_tiles_for_every_step_that_it_takes(
    lengths: list[int], queries: int, more_rows: int, more_tokens: int
) -> None:
    rows, tokens = len(lengths) + more_rows, sum(lengths) + more_tokens
    needed = sum(-(-length // queries) for length in lengths)
    assert needed <= graph_tiles(rows, tokens, queries) <= most_tiles(rows, tokens, queries)


def test_nothing_to_do(device: str) -> None:
    query, pool = torch.zeros(0, 2, 32, device=device), torch.zeros(4, 1, 32, device=device)
    tiles = torch.zeros(0, 4, dtype=torch.int32, device=device)
    assert paged_prefill(query, pool, pool, tiles, tiles, 4, 1.0).shape == (0, 2, 32)


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
    paged_prefill(query, pool, pool, tiles, tiles, 4, 1.0)
    assert grids == [(70_000, 2, 1)]


def test_large_scores_do_not_overflow(device: str) -> None:
    spans, query, keys, values, pages = inputs([(0, 20)], 2, 1, 32, 4, device)
    ragged, plain = backend(2, 1, 32, spans, device), TorchAttention()
    found = ragged.run(ragged.plan(spans, pages, 4), query * 1e3, keys, values, 1.0)
    expected = plain.run(plain.plan(spans, pages, 4), query * 1e3, keys, values, 1.0)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype", "queries"),
    [(32, 8, torch.bfloat16, 16), (6, 1, torch.bfloat16, 8), (1, 1, torch.bfloat16, 64), (64, 1, torch.float32, 1)],
)
def test_a_tile_holds_whole_groups(heads: int, kv_heads: int, dtype: torch.dtype, queries: int) -> None:
    assert tile_queries(heads, kv_heads, 64, dtype) == queries


def test_shapes_follow_the_head() -> None:
    assert choose_shape(256, torch.bfloat16).positions < choose_shape(128, torch.bfloat16).positions
    assert choose_shape(64, torch.float32).stages == 1


@pytest.mark.parametrize(
    ("head_dim", "page_size", "words", "message"),
    [(48, 4, 4, "head_dim 48"), (32, 3, 4, "pages of 3"), (32, 0, 4, "pages of 0"), (32, 4, 3, "tiles")],
)
def test_what_is_refused(head_dim: int, page_size: int, words: int, message: str, device: str) -> None:
    query, pool = torch.zeros(1, 1, head_dim, device=device), torch.zeros(4, 1, head_dim, device=device)
    tiles = torch.zeros(1, words, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=message):
        paged_prefill(query, pool, pool, tiles, tiles, page_size, 1.0)


def test_a_pool_of_8_bit_floats_is_read_exactly(device: str) -> None:
    spans, query, keys, values, pages = inputs([(17, 23), (4, 1)], 4, 2, 32, 16, device)
    keys, values = (to_pool(part.nan_to_num(), torch.float8_e4m3fn) for part in (keys, values))
    ragged, plain = backend(4, 2, 32, spans, device), TorchAttention()
    found = ragged.run(ragged.plan(spans, pages, 16), query, keys, values, 0.2)
    plan = plain.plan(spans, pages, 16)
    expected = plain.run(plan, query, keys.float(), values.float(), 0.2)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(plain.run(plan, query, keys, values, 0.2), expected, atol=1e-6, rtol=1e-6)
