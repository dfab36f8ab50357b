"""The Triton decode attention against its oracle, in float32."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.attention import paged_decode as kernel
from tandem.engine_core.kernels.attention.decode_plans import TILES, choose_plan, choose_splits, choose_tile, fit_plan
from tandem.engine_core.kernels.attention.paged_decode import paged_decode
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.kv_dtype import to_pool
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.reference import attention as reference
from tandem.engine_core.kernels.tiles.plan_types import DecodePlan, Tile
from tandem.engine_core.kernels.tiles.table import NO_TABLE, DecodeKey, TileTable
from tests.fakes.gpus import A100, B200, H20, H200, L4, RTX_3090, RTX_4090, RTX_5090
from tests.fakes.launched_kernel import LaunchedKernel
from tests.support.thinned import thinned

SMALL = Tile(16, 4, 1)


class Inputs(NamedTuple):
    """The first arguments of `paged_decode`."""

    query: Tensor
    keys: Tensor
    values: Tensor
    rows: Tensor
    positions: Tensor
    page_table: PageTable


def inputs(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    device: str,
    page_stride: int | None = None,
) -> Inputs:
    """Rows in any order, pages scattered, NaN in every unowned slot."""
    page_stride = page_stride or page_size
    count = [-(-length // page_size) for length in lengths]
    free = (torch.randperm(sum(count)) + 1).tolist()
    pages = torch.zeros(len(lengths) + 1, max(count), dtype=torch.int32)
    table = PageTable(pages, page_size, page_stride)
    rows = torch.randperm(len(lengths)) + 1
    keys, values = torch.full((2, (sum(count) + 1) * page_stride, kv_heads, head_dim), torch.nan).unbind(0)
    for row, length, used in zip(rows.tolist(), lengths, count, strict=True):
        pages[row, :used] = torch.tensor([free.pop() for _ in range(used)])
        n = torch.arange(length)
        slots = table.slots(torch.full_like(n, row), n)
        for part in (keys, values):
            part[slots] = torch.randn(length, kv_heads, head_dim)
    query = torch.randn(len(lengths), heads, head_dim)
    positions = torch.tensor(lengths, dtype=torch.int32) - 1
    moved = [t.to(device) for t in (query, keys, values, rows.int(), positions)]
    return Inputs(*moved, PageTable(pages.to(device), page_size, page_stride))


def assert_equals_the_oracle(
    given: Inputs, splits: int, window: int | None = None, softcap: float | None = None
) -> None:
    found = paged_decode(*given, 0.2, splits, window=window, softcap=softcap, tile=SMALL)
    expected = reference.paged_decode(*given, 0.2, window, softcap)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [
        (4, 2, 32, 4),
        (3, 1, 64, 16),
        (14, 2, 64, 16),
        (2, 2, 96, 8),
        (5, 1, 96, 16),
        (2, 2, 128, 32),
        (6, 1, 32, 1),
        (6, 1, 256, 32),
    ],
)
def test_decode_attention_equals_the_oracle(
    heads: int, kv_heads: int, head_dim: int, page_size: int, splits: int, device: str
) -> None:
    assert_equals_the_oracle(inputs([1, 16, 17, 70], heads, kv_heads, head_dim, page_size, device), splits)


@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_pages_apart_in_the_pool_equal_the_oracle(page_size: int, device: str) -> None:
    """A page of one layer is followed by those of the others before the next page begins."""
    assert_equals_the_oracle(inputs([1, 17, 70], 4, 2, 32, page_size, device, page_stride=6 * page_size), 3)


@pytest.mark.parametrize(("window", "splits"), thinned([1, 2, 15, 16, 17, 33, 69, 70, 200], [1, 3]))
def test_a_window_equals_the_oracle(window: int, splits: int, device: str) -> None:
    """Contexts shorter and longer than the window, with its lower edge at and next to those of tiles and pages."""
    assert_equals_the_oracle(inputs([1, 15, 16, 17, 32, 33, 70], 4, 2, 32, 8, device), splits, window)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_a_soft_cap_equals_the_oracle(softcap: float, window: int | None, device: str) -> None:
    given = inputs([1, 16, 17, 70], 4, 2, 32, 8, device)
    assert_equals_the_oracle(given._replace(query=given.query * 5), 3, window, softcap)


def test_heads_of_256_with_a_window_and_a_soft_cap_equal_the_oracle(device: str) -> None:
    """The local layers of Gemma 2 have all three."""
    given = inputs([17, 40], 2, 1, 256, 16, device)
    assert_equals_the_oracle(given._replace(query=given.query * 2), 2, 20, 50.0)


def test_a_window_reads_no_key_outside_it(device: str) -> None:
    """Pages before a window may be freed: neither their keys nor their ids are read any more."""
    given = inputs([70], 2, 1, 32, 8, device)
    expected = paged_decode(*given, 0.2, 2, window=20, tile=SMALL)
    row = int(given.rows[0])
    n = torch.arange(50, device=device)
    slots = given.page_table.slots(torch.full_like(n, row), n)
    given.keys[slots], given.values[slots] = torch.nan, torch.nan
    given.page_table.pages[row, : 50 // 8] = 0
    assert torch.equal(paged_decode(*given, 0.2, 2, window=20, tile=SMALL), expected)


def test_a_launch_leaves_its_counters_at_zero(device: str) -> None:
    given = inputs([20, 70], 2, 1, 32, 8, device)
    first = paged_decode(*given, 0.2, 4, tile=SMALL)
    torch.testing.assert_close(paged_decode(*given, 0.2, 4, tile=SMALL), first, atol=1e-6, rtol=1e-6)


def test_short_rows_stay_in_one_program(device: str) -> None:
    given = inputs([20, 70], 2, 1, 32, 8, device)
    found = paged_decode(*given, 0.2, 4, tile=SMALL, least=64)
    torch.testing.assert_close(found, reference.paged_decode(*given, 0.2), atol=2e-5, rtol=2e-5)


def test_padding_rows_stay_finite_and_change_no_other_row(device: str) -> None:
    given = inputs([20], 2, 1, 32, 4, device)
    given.keys[:4], given.values[:4] = 0.0, 0.0
    nothing = torch.zeros(2, dtype=torch.int32, device=device)
    given = given._replace(
        query=torch.cat((given.query, torch.randn(2, 2, 32, device=device))),
        rows=torch.cat((given.rows, nothing)),
        positions=torch.cat((given.positions, nothing)),
    )
    found = paged_decode(*given, 0.2, 2, tile=SMALL)
    assert found.isfinite().all()
    torch.testing.assert_close(found, reference.paged_decode(*given, 0.2), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("pair", [None, (0.02, 30.0)], ids=["no scales", "scales"])
def test_a_pool_of_8_bit_floats_is_read_exactly(pair: tuple[float, float] | None, splits: int, device: str) -> None:
    given = inputs([1, 16, 70], 4, 2, 32, 8, device)
    keys, values = (to_pool(part.nan_to_num(), torch.float8_e4m3fn) for part in (given.keys, given.values))
    key_scale, value_scale = pair or (1.0, 1.0)
    scales = None if pair is None else torch.tensor(pair, device=device)
    stored = given._replace(query=given.query * key_scale, keys=keys, values=values)
    found = paged_decode(*stored, 0.2, splits, tile=SMALL, scales=scales)
    meant = given._replace(keys=keys.float() * key_scale, values=values.float() * value_scale)
    expected = reference.paged_decode(*meant, 0.2)
    torch.testing.assert_close(found, expected, atol=2e-5 * value_scale, rtol=2e-5)


def test_bfloat16_queries_over_8_bit_floats_are_multiplied_in_float16(device: str) -> None:
    """Scores of a usual size, from large stored keys and small queries."""
    given = inputs([1, 16, 70], 4, 2, 32, 8, device)
    keys = to_pool(given.keys.nan_to_num() * 60, torch.float8_e4m3fn)
    values = to_pool(given.values.nan_to_num(), torch.float8_e4m3fn)
    stored = given._replace(query=(given.query / 60).bfloat16(), keys=keys, values=values)
    found = paged_decode(*stored, 0.2, 3, tile=SMALL)
    assert found.dtype == torch.bfloat16
    meant = stored._replace(query=stored.query.float(), keys=keys.float(), values=values.float())
    torch.testing.assert_close(found.float(), reference.paged_decode(*meant, 0.2), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("head_dim", "pairs"), [(64, 256), (64, 512), (128, 32), (128, 512), (128, 1024)])
@pytest.mark.parametrize("gpu", [H200, replace(H200, tiles=NO_TABLE)], ids=["measured", "by rule"])
def test_plans_for_8_bit_floats_equal_the_oracle(gpu: GpuTraits, head_dim: int, pairs: int, device: str) -> None:
    """The plan's number of splits, contexts within and beyond the minimum positions per split, and a window."""
    byte = torch.float8_e4m3fn
    given = inputs([1, 127, 300, 1100], 4, 1, head_dim, 16, device)
    keys, values = (to_pool(part.nan_to_num(), byte) for part in (given.keys, given.values))
    stored = given._replace(query=given.query.bfloat16(), keys=keys, values=values)
    plan = fit_plan(choose_plan(head_dim, pairs, torch.bfloat16, byte, gpu), stored.query, keys, gpu)
    meant = stored._replace(query=stored.query.float(), keys=keys.float(), values=values.float())
    for window in (None, 200):
        found = paged_decode(*stored, 0.2, plan.splits, window=window, tile=plan.tile, least=plan.least)
        expected = reference.paged_decode(*meant, 0.2, window)
        torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("length", [1, 40, 64])
def test_a_row_of_one_page_equals_the_oracle(length: int, device: str) -> None:
    assert_equals_the_oracle(inputs([length, 3], 2, 1, 32, 64, device), 2)


def test_large_scores_do_not_overflow(device: str) -> None:
    given = inputs([40], 2, 1, 32, 4, device)
    # Multiples of a thousand: different scores differ by far more than their rounding.
    given = given._replace(query=given.query.round() * 1e3, keys=given.keys.round())
    found = paged_decode(*given, 1.0, 4, tile=SMALL)
    torch.testing.assert_close(found, reference.paged_decode(*given, 1.0), atol=1e-4, rtol=1e-4)


def test_large_scores_reach_the_soft_cap(device: str) -> None:
    given = inputs([40], 2, 1, 32, 4, device)
    given = given._replace(query=given.query * 1e3)
    found = paged_decode(*given, 1.0, 4, softcap=3.0, tile=SMALL)
    torch.testing.assert_close(found, reference.paged_decode(*given, 1.0, softcap=3.0), atol=1e-4, rtol=1e-4)


def test_splits_fill_the_device() -> None:
    assert choose_splits(1, 8, 132, 448) == 14
    assert choose_splits(1, 8, 132, 131072) == 33
    assert choose_splits(1, 1, 132, 131072) == 64
    assert choose_splits(8, 8, 132, 448) == 5
    assert choose_splits(31, 8, 132, 448) == 2
    assert [choose_splits(rows, 8, 132, 131072) for rows in (32, 33, 64)] == [1, 1, 1]
    assert choose_splits(256, 8, 132, 131072) == 1
    assert choose_splits(1, 1, 132, 1) == 1


def test_tiles_depend_on_the_number_of_pairs() -> None:
    half, byte = torch.bfloat16, torch.float8_e4m3fn
    tiles = [choose_tile(64, pairs, half, half) for pairs in (8, 64, 256, 2048)]
    assert len(set(tiles)) == 4
    assert choose_tile(256, 8, torch.float32, torch.float32).stages == 1
    differ = [
        [n for n in (8, 32, 256, 512, 1024) if choose_tile(d, n, half, byte) != choose_tile(d, n, half, half)]
        for d in (32, 64, 128, 256)
    ]
    assert differ == [[], [256, 512], [32, 256, 512, 1024], []]
    bare = replace(H200, tiles=NO_TABLE)
    for pairs in (32, 256, 512, 1024):
        assert choose_plan(128, pairs, half, byte, bare).tile == choose_tile(128, pairs, half, byte)


@pytest.mark.parametrize(("heads", "warps"), [(1, 1), (16, 1), (17, 2), (32, 2), (64, 4)])
def test_many_query_heads_of_a_kv_head_have_a_warp_for_each_16(heads: int, warps: int) -> None:
    query, keys = torch.empty(1, heads, 128, dtype=torch.bfloat16), torch.empty(1, 1, 128, dtype=torch.float8_e4m3fn)
    assert fit_plan(DecodePlan(Tile(32, 1, 3), 64), query, keys, H200).tile.warps == warps
    assert fit_plan(DecodePlan(Tile(32, 4, 3), 64), query, keys, H200).tile.warps == 4


def test_splits_follow_the_number_of_multiprocessors() -> None:
    splits = {gpu.name: choose_splits(2, 8, gpu.multiprocessors, 8192) for gpu in (L4, H20, A100, B200, RTX_5090)}
    assert list(splits.values()) == [8, 10, 14, 19, 22], splits


def fitted(gpu: GpuTraits, head_dim: int, heads: int = 4, dtype: torch.dtype = torch.bfloat16) -> list[int]:
    """Return the stages of the tiles for few to many pairs on a GPU, with one KV head."""
    query, keys = torch.empty(1, heads, head_dim, dtype=torch.bfloat16), torch.empty(1, 1, head_dim, dtype=dtype)
    plans = [DecodePlan(choose_tile(head_dim, pairs, torch.bfloat16, dtype), 64) for pairs in TILES[head_dim]]
    return [fit_plan(plan, query, keys, gpu).tile.stages for plan in plans]


def test_keys_and_values_are_loaded_early_only_where_that_was_measured_to_be_faster() -> None:
    half, byte = torch.bfloat16, torch.float8_e4m3fn
    bare, without_pdl = (replace(gpu, tiles=NO_TABLE) for gpu in (H200, L4))
    given = [(128, 512, half, bare), (128, 4096, half, bare), (128, 511, half, bare), (64, 2048, half, bare)]
    given += [(128, 512, byte, bare), (128, 512, half, without_pdl)]
    plans = [choose_plan(width, pairs, half, kv_dtype, gpu) for width, pairs, kv_dtype, gpu in given]
    assert [plan.early for plan in plans] == [True, True, False, False, False, False]
    assert choose_plan(128, 512, torch.float32, torch.float32, bare).early is False


def test_a_table_decides_on_early_loads_too_but_for_gpus_without_dependent_launch() -> None:
    measured = DecodePlan(Tile(32, 1, 3), 64, 1, early=True)
    tables = [TileTable("a", {}, {DecodeKey(64, 16, 512): measured})] * 2
    gpus = [replace(gpu, tiles=table) for gpu, table in zip((H200, L4), tables, strict=True)]
    found = [choose_plan(64, 512, torch.bfloat16, torch.bfloat16, gpu) for gpu in gpus]
    assert found == [measured, measured._replace(early=False)]


@pytest.mark.parametrize(("heads", "early"), [(1, True), (16, True), (17, False), (32, False)])
def test_many_query_heads_leave_no_registers_for_early_loads(heads: int, early: bool) -> None:
    query, keys = (torch.empty(1, count, 128, dtype=torch.bfloat16) for count in (heads, 1))
    assert fit_plan(DecodePlan(Tile(64, 4, 2), 1024, early=True), query, keys, H200).early is early


@pytest.mark.parametrize("gpu", [A100, H20, H200, B200], ids=lambda gpu: gpu.name)
def test_tiles_of_gpus_with_enough_shared_memory_are_the_measured_ones(gpu: GpuTraits) -> None:
    for head_dim, tiles in TILES.items():
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            measured = [choose_tile(head_dim, pairs, torch.bfloat16, dtype).stages for pairs in tiles]
            for heads in (1, 8, 32):
                assert fitted(gpu, head_dim, heads, dtype) == measured


@pytest.mark.parametrize("gpu", [RTX_3090, L4, RTX_4090, RTX_5090], ids=lambda gpu: gpu.name)
def test_tiles_have_as_many_stages_as_fit(gpu: GpuTraits) -> None:
    """Four stages of head_dim 128 keep 96 KiB of keys and values, plus 6 KiB of queries and scores."""
    assert [tile.stages for tile in TILES[128].values()] == [3, 3, 4, 2]
    assert fitted(gpu, 128) == [3, 3, 3, 2]
    assert fitted(gpu, 64) == [tile.stages for tile in TILES[64].values()]
    assert fitted(gpu, 128, dtype=torch.float8_e4m3fn) == [3, 3, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"splits": 0}, "splits"),
        ({"splits": 65}, "splits"),
        ({"window": 0}, r"\bwindow\b.* 0\b"),
        ({"softcap": 0.0}, r"\bsoft cap\b.* 0\.0\b"),
    ],
)
def test_arguments_out_of_range_are_refused(change: dict[str, int], message: str, device: str) -> None:
    given = inputs([4], 2, 1, 32, 4, device)
    with pytest.raises(ValueError, match=message):
        paged_decode(*given, **({"scale": 1.0, "splits": 1} | change))


def test_a_page_size_that_is_no_power_of_two_is_refused(device: str) -> None:
    given = inputs([4], 2, 1, 32, 3, device)
    with pytest.raises(ValueError, match=r" 3 positions\b.*\bpage size\b"):
        paged_decode(*given, 1.0, 1)


@pytest.mark.parametrize("pdl", [False, True])
def test_the_launch_is_chained_if_asked(pdl: bool, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    launched = LaunchedKernel()
    monkeypatch.setattr(kernel, "_paged_decode_kernel", launched)
    paged_decode(*inputs([4], 2, 1, 32, 4, device), 1.0, 1, pdl=pdl)
    assert (launched.options["PDL"], launched.options.get("launch_pdl", False)) == (pdl, pdl)
