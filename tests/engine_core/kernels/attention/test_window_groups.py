"""Attention over tables of a window: pages given up are NaN, and their ids stay in the table."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.attention.torch import TorchPlanner
from tandem.engine_core.attention.triton import DecodeStep, MixedStep, RaggedGraphPlanner, RaggedPlanner
from tandem.engine_core.kernels.attention.extra_splits import assign_extra_splits
from tandem.engine_core.kernels.attention.paged_prefill import tile_queries
from tests.engine_core.kernels.attention.test_paged_prefill import A100
from tests.support.window_pool import WindowPool, query_of, window_pool

WINDOW, PAGE, CHUNK, MAX_LEN = 20, 4, 24, 400
FULL, LOCAL = LayerAttention(0.3), LayerAttention(0.3, WINDOW, group=1)
LAYERS = (FULL, LOCAL)

EDGES = [(start, 1) for start in (0, 1, 18, 19, 20, 21, 22, 23, 24, 39, 61, 150)]
"""Decode rows around the edge of the window, and rows far beyond it."""
CHUNKS = [(0, 1), (0, 24), (3, 17), (19, 24), (20, 5), (24, 4), (57, 24), (299, 24)]
"""Prompts and chunks, within the window and beyond it."""
MIXED = [*EDGES[::2], *CHUNKS[::2]]


def pool_of(work: list[tuple[int, int]], device: str = "cpu", max_len: int = MAX_LEN, **options: Any) -> WindowPool:
    return window_pool(work, WINDOW, PAGE, 2, 32, max_len=max_len, chunk=CHUNK, device=device, **options)


def check(found: Tensor, pool: WindowPool, query: Tensor, layer: LayerAttention) -> None:
    torch.testing.assert_close(found.double(), pool.expected(query, layer), atol=3e-5, rtol=0)


def ragged_planner(pool: WindowPool, heads: int, device: str) -> RaggedPlanner:
    queries = tile_queries(heads, 2, 32, torch.float32)
    tokens = sum(span.length for span in pool.spans)

    def host(*shape: int) -> Tensor:
        return torch.full(shape, -9, dtype=torch.int32)

    return RaggedPlanner.allocate(host, torch.device(device), A100, queries, len(pool.spans), tokens)


@pytest.mark.parametrize("max_len", [MAX_LEN, 326], ids=["a ring", "a column for each page"])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("work", [EDGES, CHUNKS, MIXED], ids=["decode", "chunks", "mixed"])
def test_torch_reads_no_page_outside_the_window(
    work: list[tuple[int, int]], softcap: float | None, max_len: int
) -> None:
    pool = pool_of(work, max_len=max_len)
    query = query_of(pool, 4)
    layers = [LayerAttention(0.3, layer.window, softcap, group=layer.group) for layer in LAYERS]
    step = TorchPlanner(layers).plan(pool.spans, pool.tables)
    for layer in layers:
        check(step.run(query, pool.keys, pool.values, layer), pool, query, layer)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("work", [CHUNKS, MIXED], ids=["chunks", "mixed"])
def test_triton_prefill_reads_no_page_outside_the_window(work: list[tuple[int, int]], splits: int, device: str) -> None:
    pool = pool_of(work, device)
    query = query_of(pool, 4)
    ragged = ragged_planner(pool, 4, device)
    ragged.plan(pool.spans, pool.tables)
    graph = RaggedGraphPlanner.build(ragged, len(ragged.tiles), splits, pool.tables)
    graph.plan(pool.spans)
    for layer in LAYERS:
        check(graph.step.run(query, pool.keys, pool.values, layer), pool, query, layer)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("max_len", [MAX_LEN, 326], ids=["a ring", "a column for each page"])
def test_triton_decode_reads_no_page_outside_the_window(splits: int, max_len: int, device: str) -> None:
    pool = pool_of(EDGES, device, max_len=max_len)
    query = query_of(pool, 4)
    rows = torch.arange(len(EDGES), dtype=torch.int32, device=device)
    positions = torch.tensor([start for start, _ in EDGES], dtype=torch.int32, device=device)
    extra = assign_extra_splits(positions, splits, 2)
    for further in (None, extra):
        step = DecodeStep(rows, positions, pool.tables, splits, A100, further)
        for layer in LAYERS:
            check(step.run(query, pool.keys, pool.values, layer), pool, query, layer)


def test_mixed_steps_read_no_page_outside_the_window(device: str) -> None:
    """Decode rows come first, as graphs have them."""
    pool = pool_of(MIXED, device)
    query = query_of(pool, 4)
    count = sum(length == 1 for _, length in MIXED[: len(EDGES[::2])])
    rows = torch.arange(count, dtype=torch.int32, device=device)
    positions = torch.tensor([start for start, _ in MIXED[:count]], dtype=torch.int32, device=device)
    ragged = ragged_planner(pool, 4, device)
    prompts = RaggedGraphPlanner.build(ragged, len(ragged.tiles), 1, pool.tables)
    later = [type(span)(span.row, span.offset - count, span.start, span.length) for span in pool.spans[count:]]
    prompts.plan(later)
    step = MixedStep(DecodeStep(rows, positions, pool.tables, 2, A100), prompts.step, torch.empty_like(query))
    for layer in LAYERS:
        check(step.run(query, pool.keys, pool.values, layer), pool, query, layer)
