"""Compiled attention over tables of a window: all pages but those that a step may read are NaN, their ids are kept."""

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from flashinfer import BatchPrefillWithPagedKVCacheWrapper

from tandem.engine_core.attention import flashinfer
from tandem.engine_core.attention.base import LayerAttention, Span
from tandem.engine_core.attention.flashinfer import (
    FlashInferGraphPlanner,
    FlashInferPlanner,
    HeadShape,
    graph_wrapper,
)
from tandem.engine_core.attention.flashinfer_hopper import HopperGraphPlanner
from tandem.engine_core.attention.triton import DecodeStep, MixedStep, RaggedGraphPlanner, RaggedPlanner, max_tiles
from tandem.engine_core.kernels.attention.paged_prefill import tile_queries
from tandem.engine_core.runtime.device import read_gpu_traits
from tandem.engine_core.startup.attention import HOPPER
from tests.support.flashinfer_kernels import missing_kernel, pinned
from tests.support.window_pool import WindowPool, query_of, window_pool

pytestmark = pytest.mark.gpu

WINDOW, CHUNK, MAX_LEN, KV_HEADS = 300, 160, 5000, 4
FULL, LOCAL = LayerAttention(0.1), LayerAttention(0.1, WINDOW, group=1)
DECODES = [(start, 1) for start in (0, 15, 298, 299, 300, 301, 315, 316, 620, 1500, 4095)]
CHUNKS = [(0, 160), (5, 130), (200, 160), (299, 17), (300, 160), (477, 160), (1000, 33), (3936, 160)]
TOLERANCE = 3 * 2.0**-8


def pool_of(work: list[tuple[int, int]], head_dim: int) -> WindowPool:
    given = work, WINDOW, 16, KV_HEADS, head_dim
    return window_pool(*given, max_len=MAX_LEN, chunk=CHUNK, dtype=torch.bfloat16, device="cuda")


def check(found: Tensor, pool: WindowPool, query: Tensor, layer: LayerAttention) -> None:
    torch.testing.assert_close(found.double(), pool.expected(query, layer), atol=TOLERANCE, rtol=TOLERANCE)


def heads_of(head_dim: int) -> HeadShape:
    shape = HeadShape(4 * KV_HEADS, KV_HEADS, head_dim, torch.bfloat16)
    if missing := missing_kernel(shape.query, shape.kv, head_dim, shape.dtype, (FULL, LOCAL)):
        pytest.skip(missing)
    return shape


def library_planner(heads: HeadShape, rows: int, for_hopper: bool = False) -> FlashInferPlanner:
    return FlashInferPlanner.allocate(
        (FULL, LOCAL), pinned, torch.device("cuda"), heads, rows, 2 * rows * MAX_LEN // 16, for_hopper
    )


@pytest.mark.parametrize("backend", ["fa2", "auto"])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_flashinfer_reads_no_page_outside_the_window(head_dim: int, backend: str) -> None:
    """On Hopper "auto" is fa3."""
    heads = heads_of(head_dim)
    pool = pool_of([*DECODES[::2], *CHUNKS], head_dim)
    query = query_of(pool, heads.query)
    planner = library_planner(heads, len(pool.spans))
    for wrapper in set(planner.wrappers.values()):
        wrapper._backend = backend
    try:
        step = planner.plan(pool.spans, pool.tables)
    except (RuntimeError, OSError) as error:
        pytest.skip(f"no kernel of {backend}: {error}")
    for layer in (FULL, LOCAL):
        check(step.run(query, pool.keys, pool.values, layer), pool, query, layer)


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_prompts_in_graphs_read_no_page_outside_the_window(
    head_dim: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph's plans in sequence: all rows, and some of them."""
    if backend == "fa3" and torch.cuda.get_device_capability()[0] != HOPPER:
        pytest.skip("FlashInfer's kernels for Hopper")
    heads = heads_of(head_dim)
    pool = pool_of(CHUNKS, head_dim)
    query = query_of(pool, heads.query)
    tokens, rows = len(query) + 5, len(CHUNKS) + 1
    padded = torch.cat([query, query[:5]])
    eager = library_planner(heads, rows, backend == "fa3")
    planner: HopperGraphPlanner | FlashInferGraphPlanner
    if backend == "fa3":
        planner = HopperGraphPlanner.build(eager, rows, tokens, pool.tables)
    else:
        monkeypatch.setattr(flashinfer, "graph_wrapper", fa2_wrapper)
        try:
            planner = FlashInferGraphPlanner.build(eager, rows, tokens, [rows * 313, rows * 31], pool.tables)
        except (RuntimeError, OSError) as error:
            pytest.skip(f"no kernel of {backend}: {error}")
    out = torch.zeros_like(padded)
    for chosen in (pool.spans, pool.spans[:3]):
        planner.plan(chosen)
        planner.gather_pages()
        planned = sum(span.length for span in chosen)
        for layer in (FULL, LOCAL):
            planner.step.run_into(out, padded, pool.keys, pool.values, layer, overlaps_decode=False)
            torch.testing.assert_close(
                out[:planned].double(), pool.expected(query, layer)[:planned], atol=TOLERANCE, rtol=TOLERANCE
            )


def fa2_wrapper(workspace: Tensor, batch: int, page_ids: Tensor) -> BatchPrefillWithPagedKVCacheWrapper:
    wrapper = graph_wrapper(workspace, batch, page_ids)
    wrapper._backend = "fa2"
    return wrapper


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("splits", [1, 5])
def test_triton_decode_reads_no_page_outside_the_window(splits: int, early: bool) -> None:
    pool = pool_of(DECODES, 128)
    query = query_of(pool, 4 * KV_HEADS)
    rows = torch.arange(len(DECODES), dtype=torch.int32, device="cuda")
    positions = torch.tensor([start for start, _ in DECODES], dtype=torch.int32, device="cuda")
    step = DecodeStep(rows, positions, pool.tables, splits, read_gpu_traits())
    for layer in (FULL, LOCAL):
        plan, count = step._plan(query, pool.keys)
        given = plan._replace(early=early), query, count, pool.keys, pool.values, layer, None
        check(step._run(*given), pool, query, layer)


def test_triton_prompts_and_mixed_steps_read_no_page_outside_the_window() -> None:
    work = [*DECODES, *CHUNKS]
    pool = pool_of(work, 128)
    query, count, gpu = query_of(pool, 4 * KV_HEADS), len(DECODES), read_gpu_traits()
    queries = tile_queries(4 * KV_HEADS, KV_HEADS, 128, torch.bfloat16)

    def host(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=True)

    ragged = RaggedPlanner.allocate(host, torch.device("cuda"), gpu, queries, len(work), len(query))
    step = ragged.plan(pool.spans, pool.tables)
    for layer in (FULL, LOCAL):
        check(step.run(query, pool.keys, pool.values, layer), pool, query, layer)
    rows = torch.arange(count, dtype=torch.int32, device="cuda")
    positions = torch.tensor([start for start, _ in DECODES], dtype=torch.int32, device="cuda")
    prompts = RaggedGraphPlanner.build(ragged, max_tiles(len(CHUNKS), len(query), queries), 3, pool.tables)
    prompts.plan([Span(span.row, span.offset - count, span.start, span.length) for span in pool.spans[count:]])
    mixed = MixedStep(DecodeStep(rows, positions, pool.tables, 3, gpu), prompts.step, torch.empty_like(query))
    for layer in (FULL, LOCAL):
        check(mixed.run(query, pool.keys, pool.values, layer), pool, query, layer)
