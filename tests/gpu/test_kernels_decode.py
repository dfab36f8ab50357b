"""The compiled kernels of a decode step, in bfloat16 and float16, against the torch oracles computed in float32."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.attention.decode_inputs import decode_inputs, decode_inputs_reference
from tandem.engine_core.kernels.attention.decode_plans import choose_splits
from tandem.engine_core.kernels.attention.extra_splits import assign_extra_splits, choose_extra_splits
from tandem.engine_core.kernels.attention.paged_decode import paged_decode
from tandem.engine_core.kernels.attention.rope import rope_and_kv_write
from tandem.engine_core.kernels.gated_activation import gated_activation
from tandem.engine_core.kernels.kv_dtype import to_pool
from tandem.engine_core.kernels.norm import add_rms_norm, rms_norm
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.reference import attention as reference_attention
from tandem.engine_core.kernels.reference import layer as reference_layer
from tandem.engine_core.kernels.reference.layer import qk_norm_rope_and_kv_write
from tandem.engine_core.kernels.tiles.plan_types import Tile
from tests.support.length_tables import tables_of

pytestmark = pytest.mark.gpu

STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of rounding once."""
VARIANTS = [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)]
"""Dtypes, and whether a kernel uses PDL, which is independent of the dtype."""


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def assert_rounded(found: Tensor, exact: Tensor, roundings: float, floor: float = 1e-3) -> None:
    """Assert that every element is within `roundings` of the exact one, in float32; small ones within the floor's."""
    step = STEP[found.dtype]
    assert found.isfinite().all()
    excess = (found.float() - exact).abs() - roundings * step * (exact.abs() + floor)
    assert excess.max().item() <= 0, f"{excess.max().item():.3g} over"


@pytest.mark.parametrize(("dtype", "pdl"), VARIANTS)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 2048), (7, 4096), (64, 576), (300, 16384), (8192, 2048)])
def test_norms_equal_their_oracles(tokens: int, hidden: int, dtype: torch.dtype, pdl: bool) -> None:
    x, residual, weight = (
        randn(tokens, hidden, dtype=dtype),
        randn(tokens, hidden, dtype=dtype),
        randn(hidden).to(dtype),
    )
    assert_rounded(rms_norm(x, weight, 1e-5, pdl=pdl), reference_layer.rms_norm(x.float(), weight.float(), 1e-5), 2.1)
    normed, total = add_rms_norm(x, residual, weight, 1e-5, pdl=pdl)
    assert torch.equal(total, x + residual)
    assert_rounded(normed, reference_layer.rms_norm(total.float(), weight.float(), 1e-5), 2.1)


@pytest.mark.parametrize(("dtype", "pdl"), VARIANTS)
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize(("tokens", "width"), [(1, 8192), (5, 100), (64, 14336), (2048, 8192)])
def test_gated_activation_equals_its_oracle(
    activation: Activation, tokens: int, width: int, dtype: torch.dtype, pdl: bool
) -> None:
    gate_up = randn(tokens, 2 * width, dtype=dtype)
    expected = reference_layer.gated_activation(gate_up.float(), activation)
    # Far in the tail the approximations of tanh diverge: hence the floor.
    assert_rounded(gated_activation(gate_up, activation, pdl), expected, 2.1, floor=1e-2)


@pytest.mark.parametrize(("dtype", "pdl"), VARIANTS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim"),
    [(1, 32, 8, 64), (9, 32, 8, 128), (64, 8, 4, 256), (500, 14, 2, 64), (3, 5, 5, 32)],
)
def test_rotation_and_kv_write_equal_the_oracle(
    tokens: int, heads: int, kv_heads: int, head_dim: int, norm: bool, dtype: torch.dtype, pdl: bool
) -> None:
    angles = torch.rand(tokens, head_dim // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    qkv = randn(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    index = torch.randperm(1000, device="cuda")[:tokens]
    weights = tuple(randn(head_dim).to(dtype) for _ in range(2)) if norm else (None, None)
    pool, exact = (torch.zeros(2, 1000, kv_heads, head_dim, device="cuda", dtype=t) for t in (dtype, torch.float32))
    query = rope_and_kv_write(qkv, table[:, :1], table[:, 1:], index, pool[0], pool[1], *weights, pdl=pdl)
    wide = (None if w is None else w.float() for w in weights)
    expected = qk_norm_rope_and_kv_write(qkv.float(), table[:, :1], table[:, 1:], index, exact[0], exact[1], *wide)
    # A rotated element is a sum of two, each rounded twice by the norm: bounded by their size, not by the sum's.
    pairs = (lambda t: t.float().abs() + t.float().abs().roll(head_dim // 2, -1)) if norm else torch.zeros_like
    for found, wanted in ((query, expected), (pool[0], exact[0])):
        slack = 2.1 * STEP[dtype] * pairs(wanted) * 1.5
        assert_rounded(found, wanted + (found.float() - wanted).clamp(-slack, slack), 1.1, floor=1e-2)
    assert torch.equal(pool[1][index], qkv[:, heads + kv_heads :])
    assert torch.equal(pool[1].float(), exact[1])


@pytest.mark.parametrize("page_stride", [16, 16 * 2 * 28])
@pytest.mark.parametrize("batch", [1, 64, 1000])
def test_decode_inputs_equal_the_oracle(batch: int, page_stride: int) -> None:
    tokens = torch.randint(0, 128256, (257, 4096), dtype=torch.int32, device="cuda")
    pages = torch.randint(0, 2**31 - 1, (257, 256), dtype=torch.int32, device="cuda")
    rows = torch.randint(0, 257, (batch,), dtype=torch.int32, device="cuda")
    positions = torch.randint(-1500, 4096, (batch,), dtype=torch.int32, device="cuda").clamp(min=-1)
    table, tables, again = PageTable(pages, 16, page_stride), tables_of(tokens), positions.clone()
    found = decode_inputs(tables, [table], rows, positions, pdl=True)
    for ours, wanted in zip(found, decode_inputs_reference(tables, [table], rows, again), strict=True):
        assert torch.equal(ours, wanted)
    assert torch.equal(positions, again) and (positions >= 0).all()


class Paged(NamedTuple):
    """The first arguments of `paged_decode`."""

    query: Tensor
    keys: Tensor
    values: Tensor
    rows: Tensor
    positions: Tensor
    page_table: PageTable


def paged(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, page: int, dtype: torch.dtype, apart: int = 1
) -> Paged:
    """Scattered pages, NaN in every unused slot. apart: pages from one to the next of the same layer."""
    count = torch.tensor([-(-n // page) for n in lengths])
    order = torch.randperm(int(count.sum())) + 1
    table = torch.zeros(len(lengths) + 1, int(count.max()), dtype=torch.int32)
    rows = torch.randperm(len(lengths)) + 1
    for row, pages in zip(rows.tolist(), order.split(count.tolist()), strict=True):
        table[row, : len(pages)] = pages
    shape = ((int(count.sum()) + 1) * page * apart, kv_heads, head_dim)
    keys, values = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    for row, n in zip(rows.tolist(), lengths, strict=True):
        if n % page:
            start = int(table[row, n // page]) * page * apart
            keys[start + n % page : start + page] = torch.nan
            values[start + n % page : start + page] = torch.nan
    keys[:page], values[:page] = torch.nan, torch.nan
    positions = torch.tensor(lengths, dtype=torch.int32) - 1
    query = randn(len(lengths), heads, head_dim, dtype=dtype)
    page_table = PageTable(table.cuda(), page, page * apart)
    return Paged(query, keys, values, rows.int().cuda(), positions.cuda(), page_table)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page", "dtype", "pdl"),
    [
        *((*shape, *variant) for shape in ((32, 8, 64, 16), (8, 4, 256, 16)) for variant in VARIANTS),
        (32, 8, 128, 16, torch.bfloat16, True),
        (14, 2, 64, 64, torch.bfloat16, True),
        (32, 1, 64, 1, torch.bfloat16, True),
        (6, 6, 128, 256, torch.bfloat16, True),
    ],
)
@pytest.mark.parametrize(
    "lengths", [[1], [448], [1, 2, 16, 17, 64, 65, 1000, 4097], list(range(1, 600, 9)), [131072, 5]]
)
def test_decode_attention_equals_the_oracle(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, page: int, dtype: torch.dtype, pdl: bool
) -> None:
    given = paged(lengths, heads, kv_heads, head_dim, page, dtype)
    scale = head_dim**-0.5
    exact = reference_attention.paged_decode(*given, scale)
    # Weights are rounded to the pool's dtype before they meet values of size about 1: a few roundings of that size.
    tolerance = 2 * STEP[dtype]
    for splits in {1, 3, choose_splits(len(lengths), kv_heads, 132, max(lengths)), 64}:
        for _ in range(2):
            found = paged_decode(*given, scale, splits, pdl=pdl)
            torch.testing.assert_close(found.float(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 64), (32, 8, 128)])
@pytest.mark.parametrize("rows", [64, 300])
def test_extra_splits_of_long_rows_equal_the_oracle(
    rows: int, heads: int, kv_heads: int, head_dim: int, pdl: bool
) -> None:
    """One row gets several of them, three share the rest, and none is left."""
    splits = choose_splits(rows, kv_heads, 132, 131_072)
    count = choose_extra_splits(rows, kv_heads, 132, 131_072, splits)
    for long in ([131_072], [100_000, 70_000, 40_000], [17_000] * 30):
        given = paged([*long, *range(1, rows - len(long) + 1)], heads, kv_heads, head_dim, 16, torch.bfloat16)
        exact = reference_attention.paged_decode(*given, head_dim**-0.5)
        for _ in range(2):
            extra_splits = assign_extra_splits(given.positions, splits, count, pdl=pdl)
            # As in a step, where the preceding kernel is another one: extra splits are read before it has finished.
            torch.empty(1, device="cuda").zero_()
            found = paged_decode(*given, head_dim**-0.5, splits, pdl=pdl, extra_splits=extra_splits)
            torch.testing.assert_close(found.float(), exact, atol=2**-7, rtol=2**-7)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_early_loads_change_no_result(dtype: torch.dtype, head_dim: int) -> None:
    """Lengths at the edges of the first blocks, with and without splits and a window."""
    lengths = [near + 32 * n for n in range(9) for near in (1, 2, 31, 32)] + [1000, 4097]
    given = paged(lengths, 32, 8, head_dim, 16, torch.bfloat16)
    if dtype.itemsize == 1:
        given = given._replace(keys=to_pool(given.keys, dtype), values=to_pool(given.values, dtype))
    for tile in (Tile(32, 1, 3), Tile(64, 4, 2), Tile(64, 4, 4)):
        for splits, window in ((1, None), (5, None), (3, 70)):
            options = {"pdl": True, "tile": tile, "window": window, "least": 64}
            expected, found = (paged_decode(*given, 0.125, splits, **options, early=e) for e in (False, True))
            torch.testing.assert_close(found, expected, atol=2**-7, rtol=2**-7)


@pytest.mark.parametrize("page", [1, 16, 256])
def test_pages_apart_in_the_pool_equal_the_oracle(page: int) -> None:
    """A page of one layer is followed by those of the others before the next page begins."""
    given = paged([1, 64, 1000, 4097], 32, 8, 64, page, torch.bfloat16, apart=2 * 4)
    exact = reference_attention.paged_decode(*given, 0.125)
    for splits in (1, 6):
        found = paged_decode(*given, 0.125, splits, pdl=True)
        torch.testing.assert_close(found.float(), exact, atol=2**-7, rtol=2**-7)


BANDS = [(window, softcap) for window in (None, 1, 63, 64, 65, 512, 5000) for softcap in (None, 2.0, 50.0)]
FEW_BANDS = [(None, 2.0), (1, 50.0), (63, None), (65, 50.0), (512, None)]
"""Windows and soft caps; a kernel is compiled for each, so only one shape and dtype meets all of them."""
BANDED = [(32, 8, 64, torch.bfloat16, *band) for band in BANDS] + [
    (*shape, dtype, *band)
    for shape, dtype in (
        ((32, 8, 64), torch.float16),
        *(((32, 8, 128), dtype) for dtype in STEP),
        *(((8, 4, 256), dtype) for dtype in STEP),
    )
    for band in FEW_BANDS
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "dtype", "window", "softcap"), BANDED)
def test_windows_and_soft_caps_equal_the_oracle(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    """Contexts shorter and longer than the window, with its lower edge at and next to those of tiles and pages."""
    given = paged([1, 2, 63, 64, 65, 128, 577, 1000, 4097], heads, kv_heads, head_dim, 16, dtype)
    scale = 2 * head_dim**-0.5
    exact = reference_attention.paged_decode(*given, scale, window, softcap)
    for splits in (1, 5, 64):
        found = paged_decode(*given, scale, splits, window=window, softcap=softcap, pdl=True)
        torch.testing.assert_close(found.float(), exact, atol=3 * STEP[dtype], rtol=3 * STEP[dtype])


def test_one_graph_serves_every_length() -> None:
    given = paged([700] * 4, 32, 8, 64, 16, torch.bfloat16)
    given.keys.nan_to_num_(0.5)
    given.values.nan_to_num_(0.5)
    paged_decode(*given, 0.125, 8, pdl=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = paged_decode(*given, 0.125, 8, pdl=True)
    for _ in range(20):
        given.positions.copy_(torch.randint(0, 700, (4,), dtype=torch.int32))
        given.rows.copy_(torch.randint(1, 5, (4,), dtype=torch.int32))
        given.query.copy_(randn(4, 32, 64))
        graph.replay()
        exact = reference_attention.paged_decode(*given, 0.125)
        torch.testing.assert_close(found.float(), exact, atol=2**-7, rtol=2**-7)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_chain_with_early_launches_equals_one_without(batch: int, early: bool) -> None:
    """Norm, rotation and attention of several layers in one graph, each kernel launched with PDL.

    The newest keys and values are wrong until the rotation has stored them.
    """
    lengths = [37 + 31 * i for i in range(batch)]
    layers = [paged(lengths, 32, 8, 64, 16, torch.bfloat16) for _ in range(4)]
    _, _, _, rows, positions, table = layers[0]
    pools = [(given.keys.nan_to_num_(0.5), given.values.nan_to_num_(0.5)) for given in layers]
    index = table.slots(rows.long(), positions.long())
    angles = torch.rand(batch, 1, 64, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    weight = randn(3072).bfloat16()
    start = randn(batch, 3072, dtype=torch.bfloat16)

    def chain(pdl: bool) -> Tensor:
        stream, update = start, start
        for keys, values in pools:
            normed, stream = add_rms_norm(update, stream, weight, 1e-5, pdl=pdl)
            query = rope_and_kv_write(normed.view(batch, 48, 64), cos, sin, index, keys, values, pdl=pdl)
            chained = {"pdl": pdl, "early": early and pdl}
            attended = paged_decode(query, keys, values, rows, positions, table, 0.125, 6, **chained)
            gate_up = torch.cat((attended.flatten(1), stream, attended.flatten(1)[:, :1024]), 1)
            update = gated_activation(gate_up, Activation.SILU, pdl)
        return stream

    expected = chain(False)
    for given in pools:
        given[0][index], given[1][index] = 9.0, 9.0
    torch.cuda.synchronize()
    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(True)
    for _ in range(50):
        for given in pools:
            given[0][index], given[1][index] = 9.0, 9.0
        graph.replay()
        # The combining order is fixed, so early launches change no bit.
        assert torch.equal(found, expected)
