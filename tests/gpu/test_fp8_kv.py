"""FP8 KV cache on CUDA: writes, reads, and the model's loss of accuracy.

Reading is exact, so the attention kernels over such a pool have the same oracle and tolerance as over any other.
"""

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tandem.engine_core.attention.base import LayerAttention, Span
from tandem.engine_core.attention.triton import RaggedPlanner
from tandem.engine_core.kernels.attention.decode_plans import choose_splits
from tandem.engine_core.kernels.attention.paged_decode import paged_decode
from tandem.engine_core.kernels.attention.paged_prefill import tile_queries
from tandem.engine_core.kernels.attention.rope import rope_and_kv_write
from tandem.engine_core.kernels.kv_dtype import to_pool
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.reference import attention as reference_attention
from tandem.engine_core.kernels.reference.layer import qk_norm_rope_and_kv_write
from tandem.engine_core.runtime.device import read_gpu_traits
from tandem.engine_core.startup.attention import HOPPER
from tests.support.flashinfer_kernels import missing_kernel, pinned
from tests.support.fp8_kv import Loss, build, logits, runtime_of, texts

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
SHAPES = [(32, 8, 64), (32, 8, 128), (8, 4, 256), (14, 2, 64), (5, 5, 32)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
POOLS = [(*shape, 16, dtype) for shape in SHAPES for dtype in DTYPES] + [
    (*shape, page, torch.bfloat16) for shape in (SHAPES[0], SHAPES[2]) for page in (1, 4096)
]
"""Heads, page size and dtype. Each has its own kernel to compile, so only two shapes meet the other page sizes."""
WORK = [(0, 300), (700, 1), (0, 1), (250, 70), (16, 16), (4000, 97)]
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


FACTORS = 4.0, 2.0
"""Factor of keys and values before they are stored: the inverse of their scales."""


def scales() -> Tensor:
    return torch.tensor([1 / factor for factor in FACTORS], device="cuda")


def read(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Dequantize a pool of 8-bit floats."""
    return keys.float() / FACTORS[0], values.float() / FACTORS[1]


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_written_keys_and_values_equal_the_oracle(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, scaled: bool
) -> None:
    """Values equal the oracle's bitwise, including clamped ones; keys too unless RoPE's own rounding crosses a
    quantization boundary."""
    tokens = 300
    angles = torch.rand(tokens, head_dim // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    qkv = randn(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype) * 3
    qkv[:7, -1, :3] = 1e4
    index = torch.randperm(1000, device="cuda")[:tokens]
    found, exact = (torch.zeros(2, 1000, kv_heads, head_dim, device="cuda", dtype=dtype).to(FP8) for _ in range(2))
    scales = torch.tensor([0.25, 4.0], device="cuda") if scaled else None
    given = (qkv, table[:, :1], table[:, 1:], index)
    query = rope_and_kv_write(*given, found[0], found[1], scales=scales, pdl=True)
    expected_query = qk_norm_rope_and_kv_write(*given, exact[0], exact[1], scales=scales)
    step = STEP.get(dtype, 1e-5)
    torch.testing.assert_close(query, expected_query, atol=step, rtol=2 * step)
    assert torch.equal(found[1].float(), exact[1].float())
    assert found[1].float().max() == 448
    keys, expected = found[0].float(), exact[0].float()
    assert ((keys - expected).abs() <= expected.abs() / 7 + 2.0**-9).all()
    assert (keys != expected).float().mean() < 2e-3


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page", "dtype"), [pool for pool in POOLS if pool[-1] in STEP]
)
def test_decode_attention_equals_the_oracle(
    heads: int, kv_heads: int, head_dim: int, page: int, dtype: torch.dtype
) -> None:
    lengths = torch.tensor([1, 17, 448, 1000, 4095])
    used = -(-lengths // page)
    table = torch.zeros(6, int(used.max()), dtype=torch.int32)
    pages = torch.randperm(int(used.sum())) + 1
    for row, own in enumerate(pages.split(used.tolist())):
        table[row + 1, : len(own)] = own
    shape = ((int(used.sum()) + 1) * page, kv_heads, head_dim)
    keys, values = (to_pool(randn(*shape, dtype=dtype) * factor, FP8) for factor in FACTORS)
    query, rows = randn(5, heads, head_dim, dtype=dtype), torch.arange(1, 6, dtype=torch.int32, device="cuda")
    positions, table = (lengths - 1).int().cuda(), table.cuda()
    scale = head_dim**-0.5
    given = (rows, positions, PageTable(table, page, page), scale)
    exact = reference_attention.paged_decode(query, *read(keys, values), *given)
    for splits in {1, choose_splits(5, kv_heads, 132, 4096)}:
        found = paged_decode(query / FACTORS[0], keys, values, *given, splits, pdl=True, scales=scales())
        torch.testing.assert_close(found.float(), exact, atol=2 * STEP[dtype], rtol=2 * STEP[dtype])


@pytest.mark.parametrize("narrow", [False, True], ids=["same dtype", "fp8"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page", "dtype"), POOLS)
def test_rows_of_any_lengths_equal_the_oracle(
    heads: int, kv_heads: int, head_dim: int, page: int, dtype: torch.dtype, narrow: bool
) -> None:
    spans, offset = [], 0
    for row, (start, length) in enumerate(WORK):
        spans.append(Span(row, offset, start, length))
        offset += length
    used = [-(-(span.start + span.length) // page) for span in spans]
    pages = torch.zeros(len(spans), max(used), dtype=torch.int32)
    for row, own in enumerate((torch.randperm(sum(used)) + 1).split(used)):
        pages[row, : len(own)] = own
    page_table = PageTable(pages.cuda(), page, page)
    shape = ((sum(used) + 1) * page, kv_heads, head_dim)
    keys, values = (randn(*shape, dtype=dtype) for _ in range(2))
    read_keys, read_values, factor = keys, values, 1.0
    if narrow:
        keys, values = (to_pool(x * own, FP8) for x, own in zip((keys, values), FACTORS, strict=True))
        (read_keys, read_values), factor = read(keys, values), FACTORS[0]
    query = randn(offset, heads, head_dim, dtype=dtype)
    scale = head_dim**-0.5
    ragged = RaggedPlanner.allocate(
        lambda *of: torch.zeros(of, dtype=torch.int32, pin_memory=True),
        torch.device("cuda"),
        read_gpu_traits(),
        tile_queries(heads, kv_heads, head_dim, dtype),
        len(spans),
        offset,
    )
    layer, own_scales = LayerAttention(scale), scales() if narrow else None
    found = ragged.plan(spans, [page_table]).run(query / factor, keys, values, layer, own_scales)
    exact = reference_attention.paged_prefill(query, read_keys, read_values, WORK, page_table, scale)
    tolerance = 2 * STEP.get(dtype, 1e-5)
    torch.testing.assert_close(found.float(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "kind", [LayerAttention(0.125), LayerAttention(0.125, window=100)], ids=["every position", "windowed"]
)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES[:2])
def test_flashinfer_over_8_bits_equals_the_oracle(
    heads: int, kv_heads: int, head_dim: int, kind: LayerAttention
) -> None:
    """Its fa2 kernel, with 16-bit queries; eager, and with a graph's padding."""
    if missing := missing_kernel(heads, kv_heads, head_dim, torch.bfloat16, [kind], FP8):
        pytest.skip(missing)
    from tandem.engine_core.attention.flashinfer import FlashInferPlanner, HeadShape

    spans, offset = [], 0
    for row, (start, length) in enumerate(WORK):
        spans.append(Span(row, offset, start, length))
        offset += length
    used = [-(-(span.start + span.length) // 16) for span in spans]
    pages = torch.zeros(len(spans), max(used), dtype=torch.int32)
    for row, own in enumerate((torch.randperm(sum(used)) + 1).split(used)):
        pages[row, : len(own)] = own
    # Pages of a layer are strided, as in a pool of several layers.
    page_table = PageTable(pages.cuda(), 16, 64)
    shape = ((sum(used) + 1) * 64, kv_heads, head_dim)
    keys, values = (to_pool(randn(*shape, dtype=torch.bfloat16) * factor, FP8) for factor in FACTORS)
    query = randn(offset, heads, head_dim, dtype=torch.bfloat16)
    shaped = HeadShape(heads, kv_heads, head_dim, torch.bfloat16, FP8)
    eager = FlashInferPlanner.allocate([kind], pinned, torch.device("cuda"), shaped, len(spans) + 2, sum(used))
    exact = reference_attention.paged_prefill(query, *read(keys, values), WORK, page_table, kind.scale, kind.window)
    for planner in (eager, eager.for_graph(len(spans) + 2, [sum(used)])):
        step = planner.plan(spans, [page_table])
        if planner.page_ids is not None:
            planner.gather_pages([page_table])
        found = step.run(query / FACTORS[0], keys, values, kind, scales())
        torch.testing.assert_close(found.float(), exact, atol=3 * 2.0**-8, rtol=3 * 2.0**-8)


def test_the_default_model_keeps_its_choices() -> None:
    """Chunks, mixed steps and decode from graphs, over a pool of 8-bit floats and over one of the model's own dtype."""
    wide, narrow = build("cuda", "auto"), build("cuda", "fp8")
    assert runtime_of(narrow).kv.pool.dtype == FP8
    hopper = read_gpu_traits().capability[0] == HOPPER
    library = not hopper and not missing_kernel(4, 2, 64, torch.bfloat16, [LayerAttention(0.125)], FP8)
    assert all(isinstance(slot.attention, RaggedPlanner) != library for slot in runtime_of(narrow).slots)
    model = runtime_of(narrow).model
    assert (model.kv_scales.values > 0).all()
    graphs = runtime_of(narrow).graphs
    assert graphs is not None and all(graphs.mixed), "chunks and mixed steps come from graphs, too"
    sequences = texts(wide)
    exact, found = logits(wide, sequences), logits(narrow, sequences)
    assert found.keys() >= {"chunks", "mixed", "decode from graphs"}
    for sort in exact:
        loss = Loss(exact[sort], found[sort])
        print(f"\n{sort}: {loss}", end="")
        assert loss.mean < 0.05 * loss.deviation
        assert loss.largest < 0.5 * loss.deviation
        assert loss.same_choice >= 0.95
