"""The compiled attention of prompts: split tiles, and a chunk that overlaps decode rows in one graph."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tandem.engine_core.attention.base import AttentionPlanner, AttentionStep, LayerAttention, Span
from tandem.engine_core.attention.flashinfer import FlashInferPlanner, HeadShape
from tandem.engine_core.attention.flashinfer_hopper import HopperGraphPlanner
from tandem.engine_core.attention.triton import (
    DecodeStep,
    MixedStep,
    RaggedGraphPlanner,
    RaggedPlanner,
    max_tiles,
)
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.attention.paged_decode import paged_decode
from tandem.engine_core.kernels.attention.paged_prefill import choose_splits, paged_prefill, tile_queries
from tandem.engine_core.kernels.attention.rope import rope_and_kv_write
from tandem.engine_core.kernels.gated_activation import gated_activation
from tandem.engine_core.kernels.norm import add_rms_norm
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.reference import attention as reference_attention
from tandem.engine_core.runtime.device import read_gpu_traits
from tandem.engine_core.startup.attention import HOPPER
from tests.support.flashinfer_kernels import missing_kernel, pinned

pytestmark = pytest.mark.gpu

STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of rounding once."""
PAGE, LAYERS = 16, 4
Work = list[tuple[int, int]]
"""(start, length) per row."""


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def scattered(ends: list[int], apart: int = 1) -> tuple[PageTable, int]:
    """Return a page table for rows of that many positions, and the number of slots that it needs.

    apart: pages from one to the next of the same layer.
    """
    used = [-(-end // PAGE) for end in ends]
    table = torch.zeros(len(ends), max(used), dtype=torch.int32)
    for row, pages in enumerate((torch.randperm(sum(used)) + 1).split(used)):
        table[row, : len(pages)] = pages
    return PageTable(table.cuda(), PAGE, PAGE * apart), (sum(used) + 1) * PAGE * apart


def spans_of(work: Work, first_row: int = 0) -> list[Span]:
    spans, offset = [], 0
    for row, (start, length) in enumerate(work, first_row):
        spans.append(Span(row, offset, start, length))
        offset += length
    return spans


def ragged(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, rows: int, tokens: int) -> RaggedPlanner:
    return RaggedPlanner.allocate(
        lambda *of: torch.zeros(of, dtype=torch.int32, pin_memory=True),
        torch.device("cuda"),
        read_gpu_traits(),
        tile_queries(heads, kv_heads, head_dim, dtype),
        rows,
        tokens,
    )


@pytest.mark.parametrize(("dtype", "pdl"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 64), (32, 8, 128), (8, 4, 256), (14, 2, 64)])
@pytest.mark.parametrize("work", [[(2000, 64)], [(0, 40), (777, 2), (300, 128)], [(0, 256)]], ids=str)
def test_programs_that_share_a_tile_equal_the_oracle(
    work: Work, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, pdl: bool
) -> None:
    table, slots = scattered([start + length for start, length in work])
    keys, values = (randn(slots, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    spans = spans_of(work)
    query = randn(sum(span.length for span in spans), heads, head_dim, dtype=dtype)
    own = ragged(heads, kv_heads, head_dim, dtype, len(spans) + 5, len(query))
    tiles = own.upload(spans, len(own.tiles))
    exact = reference_attention.paged_prefill(query, keys, values, work, table, head_dim**-0.5)
    for splits in {1, 2, choose_splits(len(query) // own.queries, kv_heads, 132), 64}:
        for _ in range(2):
            found = paged_prefill(query, keys, values, tiles, table, head_dim**-0.5, splits, pdl=pdl)
            torch.testing.assert_close(found.float(), exact, atol=2 * STEP[dtype], rtol=2 * STEP[dtype])


KINDS = [LayerAttention(0.25, window, softcap) for window in (None, 1, 63, 64, 300) for softcap in (None, 2.0, 50.0)]
FEW_KINDS = [
    LayerAttention(0.25, window, softcap) for window, softcap in ((None, 50.0), (1, 2.0), (63, None), (300, 50.0))
]
"""Triton compiles a kernel for each kind, so only one shape of heads meets all of them."""
WORK: Work = [(0, 40), (777, 1), (63, 1), (300, 128), (4000, 97)]


def check_kinds(kinds: list[LayerAttention], heads: HeadShape, apart: int, library: bool) -> None:
    """Compare layers of these kinds, planned once, with the oracle.

    library: FlashInfer instead of Triton.
    """
    table, slots = scattered([start + length for start, length in WORK], apart)
    keys, values = (randn(slots, heads.kv, heads.head_dim, dtype=heads.dtype) for _ in range(2))
    spans = spans_of(WORK)
    query = randn(sum(span.length for span in spans), heads.query, heads.head_dim, dtype=heads.dtype)
    planner: AttentionPlanner = ragged(heads.query, heads.kv, heads.head_dim, heads.dtype, len(spans), len(query))
    if library:
        planner = FlashInferPlanner.allocate(kinds, pinned, torch.device("cuda"), heads, len(spans), slots // PAGE)
    step, tolerance = planner.plan(spans, [table]), 3 * STEP[heads.dtype]
    for layer in kinds:
        exact = reference_attention.paged_prefill(
            query, keys, values, WORK, table, layer.scale, layer.window, layer.softcap
        )
        found = step.run(query, keys, values, layer)
        torch.testing.assert_close(found.float(), exact, atol=tolerance, rtol=tolerance)


SHAPES = [
    HeadShape(heads, kv_heads, head_dim, dtype)
    for heads, kv_heads, head_dim in ((32, 8, 64), (32, 8, 128), (8, 4, 256))
    for dtype in STEP
]


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_windows_and_soft_caps_equal_the_oracle(heads: HeadShape) -> None:
    if heads == SHAPES[0]:
        check_kinds(KINDS, heads, apart=1, library=False)
    check_kinds(FEW_KINDS, heads, apart=8, library=False)


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("apart", [1, 8])
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_flashinfer_serves_the_kinds_whose_kernel_it_can_load(
    heads: HeadShape, apart: int, windowed: bool, capped: bool
) -> None:
    """Kernels are prebuilt, or compiled by FlashInfer; else our own are used (see above)."""
    kinds = [kind for kind in KINDS if ((kind.window is not None), (kind.softcap is not None)) == (windowed, capped)]
    if missing := missing_kernel(heads.query, heads.kv, heads.head_dim, heads.dtype, kinds[:1]):
        pytest.skip(missing)
    check_kinds(kinds, heads, apart, library=True)


@pytest.mark.parametrize("heads", SHAPES[::2], ids=str)
def test_plans_of_graphs_name_the_pages_in_the_page_table(heads: HeadShape) -> None:
    """One graph's plans in sequence: rows in any order, as many as fit, fewer, and none."""
    if torch.cuda.get_device_capability()[0] != HOPPER:
        pytest.skip("FlashInfer's kernels for Hopper")
    kinds = [LayerAttention(0.25), LayerAttention(0.25, window=63)]
    missing = [missing_kernel(heads.query, heads.kv, heads.head_dim, heads.dtype, [kind]) for kind in kinds]
    kinds = [kind for kind, text in zip(kinds, missing, strict=True) if not text]
    if not kinds:
        pytest.skip(missing[0])
    table, slots = scattered([start + length for start, length in WORK], 8)
    keys, values = (randn(slots, heads.kv, heads.head_dim, dtype=heads.dtype) for _ in range(2))
    tokens, tolerance = sum(length for _, length in WORK) + 7, 3 * STEP[heads.dtype]
    eager = FlashInferPlanner.allocate(kinds, pinned, torch.device("cuda"), heads, len(WORK), slots // PAGE)
    planner = HopperGraphPlanner.build(eager, len(WORK), tokens, [table])
    query = randn(tokens, heads.query, heads.head_dim, dtype=heads.dtype)
    for rows in ([0, 1, 2, 3, 4], [4, 2, 0], [3], [], [1, 4]):
        work = [WORK[row] for row in rows]
        spans = [replace(span, row=row) for span, row in zip(spans_of(work), rows, strict=True)]
        planner.plan(spans)
        planner.gather_pages()
        planned = sum(length for _, length in work)
        own = PageTable(table.pages[rows], table.page_size, table.page_stride)
        for kind in kinds:
            out = torch.full_like(query, 7)
            planner.step.run_into(out, query, keys, values, kind, overlaps_decode=False)
            assert (out[planned:] == 7).all(), "tokens that no row has stay unchanged"
            if rows:
                exact = reference_attention.paged_prefill(
                    query[:planned], keys, values, work, own, kind.scale, kind.window, kind.softcap
                )
                torch.testing.assert_close(out[:planned].float(), exact, atol=tolerance, rtol=tolerance)


def test_addresses_beyond_32_bits_equal_the_oracle() -> None:
    """Keys and values of a pool of 3 * 2^30 elements, written by the rotation and read by every kernel."""
    heads, kv_heads, head_dim, stride = 32, 8, 64, 2**20
    pool = torch.zeros(6 * stride, kv_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    keys, values = pool, pool[PAGE:]
    table = PageTable(torch.tensor([[5, 2, 4], [1, 3, 0]], dtype=torch.int32, device="cuda"), PAGE, stride)
    work: Work = [(0, 48), (0, 20)]
    rows = torch.tensor([0] * 48 + [1] * 20, device="cuda")
    positions = torch.cat((torch.arange(48), torch.arange(20))).cuda()
    angles = torch.rand(68, 1, head_dim, device="cuda") * 6
    qkv = randn(68, heads + 2 * kv_heads, head_dim)
    slots = table.slots(rows, positions)
    query = rope_and_kv_write(qkv, angles.cos(), angles.sin(), slots, keys, values)
    assert torch.equal(values[slots], qkv[:, heads + kv_heads :])
    exact = reference_attention.paged_prefill(query, keys, values, work, table, 0.125)
    layer, spans = LayerAttention(0.125), spans_of(work)
    own = ragged(heads, kv_heads, head_dim, torch.bfloat16, len(spans), len(query))
    decode = DecodeStep(rows.int(), positions.int(), [table], 2, read_gpu_traits())
    steps: list[AttentionStep] = [own.plan(spans, [table]), decode]
    if not missing_kernel(heads, kv_heads, head_dim, torch.bfloat16, [layer]):
        shape = HeadShape(heads, kv_heads, head_dim, torch.bfloat16)
        library = FlashInferPlanner.allocate([layer], pinned, torch.device("cuda"), shape, len(spans), 6)
        steps.append(library.plan(spans, [table]))
    for step in steps:
        found = step.run(query, keys, values, layer)
        torch.testing.assert_close(found.float(), exact, atol=2 * 2.0**-8, rtol=2 * 2.0**-8)


class Chain:
    """Norm, rotation, decode of some rows and a chunk of another row, layer after layer."""

    HEADS, KV_HEADS, HEAD_DIM, SPLITS = 32, 8, 64, 6

    def __init__(self, decoding: int, chunk: tuple[int, int], room: int) -> None:
        """room: prompt tokens of the graph."""
        self.singles, self.start, self.length = decoding, *chunk
        ends = [*(40 + 31 * row for row in range(decoding)), self.start + self.length]
        self.table, slots = scattered(ends)
        self.positions = torch.tensor([end - 1 for end in ends[:-1]], dtype=torch.int32, device="cuda")
        self.rows = torch.arange(decoding, dtype=torch.int32, device="cuda")
        fresh = torch.arange(self.start, self.start + self.length, dtype=torch.int32, device="cuda")
        rows = torch.cat((self.rows, torch.full_like(fresh, decoding))).long()
        positions = torch.cat((self.positions, fresh)).long()
        self.index = self.table.slots(rows, positions)
        angles = torch.rand(len(rows), 1, self.HEAD_DIM, device="cuda") * 6
        self.cos, self.sin = angles.cos(), angles.sin()
        self.pools = [tuple(randn(slots, self.KV_HEADS, self.HEAD_DIM) for _ in range(2)) for _ in range(LAYERS)]
        self.weight, self.start_of_all = randn(3072), randn(len(rows), 3072)
        self.own = ragged(self.HEADS, self.KV_HEADS, self.HEAD_DIM, torch.bfloat16, 9, room)
        self.tiles = max_tiles(9, room, self.own.queries)
        prompts = RaggedGraphPlanner.build(self.own, self.tiles, self.SPLITS, [self.table])
        prompts.plan([Span(decoding, 0, self.start, self.length)])
        out = torch.zeros(len(rows), self.HEADS, self.HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        decode = DecodeStep(self.rows, self.positions, [self.table], self.SPLITS, read_gpu_traits())
        self.step = MixedStep(decode, prompts.step, out)

    def run(self, early: bool) -> Tensor:
        """early: kernels use PDL, and a chunk overlaps the decode rows."""
        stream, update = self.start_of_all, self.start_of_all
        for keys, values in self.pools:
            normed, stream = add_rms_norm(update, stream, self.weight, 1e-5, pdl=early)
            qkv = normed.view(len(normed), 48, 64)
            query = rope_and_kv_write(qkv, self.cos, self.sin, self.index, keys, values, pdl=early)
            if early:
                self.step.run(query, keys, values, LayerAttention(0.125))
            else:
                self.one_after_the_other(query, keys, values)
            # A kernel that starts before its predecessor ends, and reads what both kernels wrote.
            gated = gated_activation(self.step.out.flatten(1), Activation.SILU, early)
            update = torch.cat((gated, stream[:, : 3072 - gated.shape[1]]), 1)
        return stream

    def one_after_the_other(self, query: Tensor, keys: Tensor, values: Tensor) -> None:
        out, given, count = self.step.out, (self.table, 0.125, self.SPLITS), self.singles
        paged_decode(query[:count], keys, values, self.rows, self.positions, *given, out=out[:count])
        tiles = self.own.tiles[: self.tiles]
        paged_prefill(query[count:], keys, values, tiles, *given, out=out[count:])


@pytest.mark.parametrize("chunk", [(0, 2), (0, 64), (1000, 128), (4000, 33)], ids=str)
@pytest.mark.parametrize("decoding", [0, 1, 16, 64])
def test_a_chunk_that_overlaps_decode_equals_one_after_it(decoding: int, chunk: tuple[int, int]) -> None:
    chain = Chain(decoding, chunk, room=128)
    expected = chain.run(False)
    chain.run(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain.run(True)
    for _ in range(50):
        for keys, values in chain.pools:
            keys[chain.index], values[chain.index] = 9.0, 9.0
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, expected)
