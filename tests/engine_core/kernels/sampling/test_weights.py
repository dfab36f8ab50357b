"""Weights of tokens, their sums, and the per-tile data passed between kernels."""
# ruff: noqa: N803

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.sampling.sort_key import ALL_MASKED, EMPTY, INVALID, best_of, load_logits, rank_value
from tandem.engine_core.kernels.sampling.weights import (
    ONE,
    UNIT,
    fixed_total,
    is_infinite,
    load_adjusted,
    load_masses,
    load_row_best,
    log2_slope,
    log_weights,
    segment_masses,
    store_tile,
    top_p_mass,
)

# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TILE, SEGMENT = 64, 16
PER_TILE = TILE // SEGMENT
GARBAGE = 1 << 61


@triton.jit
def _slopes_kernel(temperatures_ptr, slopes_ptr, y_ptr):
    index = tl.program_id(0)
    slope = log2_slope(tl.load(temperatures_ptr + index))
    tl.store(slopes_ptr + index, slope)
    tl.store(y_ptr + 4 * index, log_weights(2.0, 2.0, slope))
    tl.store(y_ptr + 4 * index + 1, log_weights(1.0, 2.0, slope))
    tl.store(y_ptr + 4 * index + 2, log_weights(-3e38, 2.0, slope))
    tl.store(y_ptr + 4 * index + 3, log_weights(float("-inf"), 2.0, slope))


def test_no_temperature_makes_a_nan_weight(device: str) -> None:
    """The best token has weight 1 at any temperature, and no other token more."""
    temperatures = [1.0, 0.5, 2.0, 1e-6, 1e-38, 2.0**-149, 3e38]
    slopes, y = torch.zeros(len(temperatures), device=device), torch.zeros(len(temperatures), 4, device=device)
    _slopes_kernel[(len(temperatures),)](torch.tensor(temperatures, device=device), slopes, y)
    exact = torch.tensor([min(math.log2(math.e) / temperature, 1e38) for temperature in temperatures])
    torch.testing.assert_close(slopes.cpu(), exact, rtol=2**-23, atol=0)
    assert torch.equal(y[:, 0], torch.zeros_like(slopes))
    assert torch.equal(y[:, 1], -slopes)
    assert (y[:, 2] <= y[:, 1]).all()
    assert (y[:, 3] == -torch.inf).all()


@triton.jit
def _row_best_kernel(tile_best_ptr, best_ptr, infinite_ptr, tiles, TILES_PAD: tl.constexpr):
    index = tl.program_id(0)
    best = load_row_best(tile_best_ptr, index, tiles, TILES_PAD)
    tl.store(best_ptr + index, best)
    tl.store(infinite_ptr + index, is_infinite(rank_value(best)).to(tl.int32))


@pytest.mark.parametrize("tiles", [1, 3, 4])
def test_the_best_rank_of_a_row_is_that_of_its_own_tiles(tiles: int, device: str) -> None:
    """One unusable tile invalidates the row; an empty one does not."""
    sound = (5 << 20) | 7
    rows = [[sound] * tiles, [EMPTY.value] * tiles, [ALL_MASKED.value] * tiles, [sound] * tiles, [EMPTY.value] * tiles]
    rows[3][-1], rows[4][0] = INVALID.value, sound
    ranks = torch.full((6, tiles), GARBAGE, device=device)
    ranks[:5] = torch.tensor(rows)
    best, infinite = torch.zeros(5, dtype=torch.int64, device=device), torch.zeros(5, dtype=torch.int32, device=device)
    _row_best_kernel[(5,)](ranks, best, infinite, tiles, TILES_PAD=4)
    assert best.tolist() == [sound, EMPTY.value, ALL_MASKED.value, INVALID.value, sound]
    assert infinite.tolist() == [0, 1, 1, 1, 0]


@triton.jit
def _adjusted_kernel(logits_ptr, adjusted_ptr, touched_ptr, out_ptr, vocab, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    ids = tl.arange(0, BLOCK)
    is_adjusted = tl.load(touched_ptr + index) != 0
    x = load_adjusted(logits_ptr + index * BLOCK, adjusted_ptr + index * BLOCK, is_adjusted, ids, ids < vocab)
    tl.store(out_ptr + index * BLOCK + ids, x)


def test_logits_are_read_from_where_they_are_and_nothing_behind_them(device: str) -> None:
    logits = torch.full((2, 16), torch.nan, device=device)
    adjusted = torch.full((2, 16), torch.nan, device=device)
    logits[0, :9], adjusted[1, :9] = torch.arange(9.0), -torch.arange(9.0)
    out = torch.zeros_like(logits)
    touched = torch.tensor([0, 5], dtype=torch.int32, device=device)
    _adjusted_kernel[(2,)](logits, adjusted, touched, out, 9, BLOCK=16)
    rest = [-torch.inf] * 7
    assert out[0].tolist() == [*map(float, range(9)), *rest]
    assert out[1].tolist() == [-float(token) for token in range(9)] + rest


@triton.jit
def _masses_kernel(weights, masses, COUNT: tl.constexpr, SEGMENT: tl.constexpr):
    values = tl.load(weights + tl.arange(0, COUNT * SEGMENT))
    tl.store(masses + tl.arange(0, COUNT), segment_masses(values, COUNT, SEGMENT))


def test_masses_of_segments_are_exact_sums_of_four_weights_each(device: str) -> None:
    """So sums are independent of order. A full segment of ones is the maximum of a sum."""
    weights = torch.rand(4, 1024, device=device).pow(8)
    weights[0], weights[1, 5:], weights[2, ::2] = 1, 2.0**-40, 2.0**-60
    masses = torch.zeros(4, dtype=torch.int64, device=device)
    _masses_kernel[(1,)](weights, masses, COUNT=4, SEGMENT=1024)
    first, second, third, fourth = weights.unflatten(1, (-1, 4)).unbind(-1)
    fours = (first + second) + (third + fourth)
    assert masses.tolist() == (fours.double() / UNIT.value).round().long().sum(1).tolist()
    exact = weights.double().sum(1)
    torch.testing.assert_close(masses.double() * UNIT.value, exact, rtol=2e-7, atol=256 * UNIT.value)


@triton.jit
def _store_kernel(
    logits_ptr,
    temperatures_ptr,
    tile_best_ptr,
    masses_ptr,
    vocab,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    tile, index, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    ids = tile * TILE + tl.arange(0, TILE)
    x = load_logits(logits_ptr + index * vocab, ids, ids < vocab)
    best = best_of(x, ids)
    temperature = tl.load(temperatures_ptr + index)
    store_tile(tile_best_ptr, masses_ptr, index, tile, tiles, x, best, tl.max(x, axis=0), temperature, SEGMENT)


@triton.jit
def _load_kernel(
    tile_best_ptr,
    masses_ptr,
    temperatures_ptr,
    found_ptr,
    y_ptr,
    tiles,
    PER_TILE: tl.constexpr,
    PAD: tl.constexpr,
):
    index = tl.program_id(0)
    top = rank_value(load_row_best(tile_best_ptr, index, tiles, PAD))
    slope = log2_slope(tl.load(temperatures_ptr + index))
    masses, y = load_masses(masses_ptr, tile_best_ptr, index, tiles, top, slope, PER_TILE, PAD)
    tl.store(found_ptr + index * PAD + tl.arange(0, PAD), masses)
    tl.store(y_ptr + index * PAD + tl.arange(0, PAD), y)


def stored(logits: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Store the tiles of rows into memory that holds garbage, with capacity for one more row."""
    rows, tiles = len(logits), triton.cdiv(logits.shape[1], TILE)
    tile_best = torch.full((rows + 1, tiles), GARBAGE, device=logits.device)
    masses = torch.full((rows + 1, tiles * PER_TILE), GARBAGE, device=logits.device)
    _store_kernel[(tiles, rows)](logits, temperatures, tile_best, masses, logits.shape[1], TILE=TILE, SEGMENT=SEGMENT)
    return tile_best, masses


@pytest.mark.parametrize("vocab", [1, 64, 65, 190])
def test_stored_masses_are_the_softmax_of_each_segment(vocab: int, device: str) -> None:
    """Tiles with the best token, far behind it, empty ones, and nonexistent ones."""
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)).to(device) * 4
    logits[1, : vocab // 2] -= 300.0
    logits[2, vocab // 3 :] = -torch.inf
    logits[2, 0] = 3.0
    logits[3] = 1.25
    temperatures = torch.tensor([1.0, 0.7, 1.9, 1e-3], device=device)
    tile_best, masses = stored(logits, temperatures)
    tiles, pad = tile_best.shape[1], 16
    found, y = (torch.full((4, pad), torch.nan, device=device) for _ in "12")
    _load_kernel[(4,)](tile_best, masses, temperatures, found, y, tiles, PER_TILE=PER_TILE, PAD=pad)
    scores = logits.double() - logits.double().amax(1, keepdim=True)
    weights = torch.nn.functional.pad((scores / temperatures.double()[:, None]).exp(), (0, pad * SEGMENT - vocab))
    expected = weights.unflatten(1, (pad, SEGMENT)).sum(-1)
    torch.testing.assert_close(found.double() * y.double().exp2(), expected, rtol=2e-5, atol=1e-12)
    assert ((found >= 0) & (found <= SEGMENT)).all(), "no garbage stands where a tile is empty"
    assert not found[:, tiles * PER_TILE :].any()
    assert (y[:, tiles * PER_TILE :] == -torch.inf).all()
    assert (tile_best[4:] == GARBAGE).all() and (masses[4:] == GARBAGE).all()


def test_rows_that_do_not_draw_have_ranks_and_no_masses(device: str) -> None:
    logits = torch.zeros(2, 100, device=device)
    tile_best, masses = stored(logits, torch.tensor([0.0, 1.0], device=device))
    assert (masses[0] == GARBAGE).all()
    assert masses[1].tolist() == [SEGMENT << 41] * 6 + [4 << 41, 0]
    assert torch.equal(tile_best[0], tile_best[1])


@triton.jit
def _totals_kernel(masses_ptr, top_p_ptr, total_ptr, kept_ptr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    total = fixed_total(tl.load(masses_ptr + tl.arange(0, BLOCK)))
    tl.store(total_ptr, total)
    for index in range(COUNT):
        tl.store(kept_ptr + index, top_p_mass(tl.load(top_p_ptr + index), total))


def test_totals_do_not_depend_on_the_order_and_top_p_keeps_a_share_of_them(device: str) -> None:
    masses = torch.rand(512, generator=torch.Generator().manual_seed(1)).pow(20).to(device)
    masses[0], masses[1] = 900.0, 2.0**-45
    shares = torch.tensor([0.0, 2.0**-149, 1e-30, 0.25, 0.9, 1 - 2**-24], device=device)
    exact = int((masses.double() * ONE.value).long().sum())
    for order in (torch.arange(512), torch.arange(511, -1, -1), torch.randperm(512)):
        total, kept = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(6, dtype=torch.int64, device=device)
        _totals_kernel[(1,)](masses[order.to(device)], shares, total, kept, COUNT=6, BLOCK=512)
        assert total.item() == exact
        assert kept.tolist() == [max(1, int(share * float(exact))) for share in shares.tolist()]
        assert kept[:3].tolist() == [1, 1, 1], "the first token always stays"
