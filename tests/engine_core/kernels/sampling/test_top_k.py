"""Rank of a row's k-th token and the mass of the first k, against a sort."""
# ruff: noqa: N803

from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.sampling.sort_key import MAX_VOCAB
from tandem.engine_core.kernels.sampling.top_k import find_kth
from tandem.engine_core.kernels.sampling.weights import ONE, load_row_best, log2_slope
from tandem.engine_core.sampling.triton_sampler import CAPACITY, GROUP, TILE
from tests.support.token_ranks import best_of_tiles, order_of, peaks_of, rank_of

# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the search: see `SamplingScratch`."""

    tile: int = 64
    group: int = 8
    capacity: int = 32


@triton.jit
def _kth_kernel(
    logits_ptr,
    adjusted_ptr,
    touched_ptr,
    tile_best_ptr,
    peaks_ptr,
    found_ids_ptr,
    found_logits_ptr,
    top_k_ptr,
    temperatures_ptr,
    least_ptr,
    mass_ptr,
    logit_stride,
    vocab,
    tiles,
    num_peaks,
    TILES_PAD: tl.constexpr,
    PEAKS_PAD: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    index = tl.program_id(0)
    best = load_row_best(tile_best_ptr, index, tiles, TILES_PAD)
    least, mass = find_kth(
        logits_ptr + index * logit_stride,
        adjusted_ptr + index * logit_stride,
        tl.load(touched_ptr + index) != 0,
        vocab,
        tile_best_ptr + index * tiles,
        peaks_ptr + index * num_peaks,
        found_ids_ptr + index * CAPACITY,
        found_logits_ptr + index * CAPACITY,
        best,
        log2_slope(tl.load(temperatures_ptr + index)),
        tl.load(top_k_ptr + index),
        num_peaks,
        PEAKS_PAD,
        CAPACITY,
        CHUNK,
    )
    tl.store(least_ptr + index, least)
    tl.store(mass_ptr + index, mass)


def found(
    logits: Tensor, top_k: list[int], temperatures: Tensor, sizes: Sizes, touched: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the ranks and masses, [S] int64 each, with garbage in the scratch.

    touched: [S] int32, nonzero for rows with adjusted logits; the others are the model's.
    """
    rows, vocab = logits.shape
    device = logits.device
    if touched is None:
        touched = torch.zeros(rows, dtype=torch.int32, device=device)
    memory = torch.full((2, rows, vocab + 3), torch.nan, device=device)
    memory[0, :, :vocab] = torch.where(touched[:, None] == 0, logits, torch.nan)
    memory[1, :, :vocab] = torch.where(touched[:, None] != 0, logits, torch.nan)
    tile_best, peaks = best_of_tiles(logits, sizes.tile), peaks_of(logits, sizes.tile, sizes.group)
    tiles, num_peaks = tile_best.shape[1], peaks.shape[1]
    ids = torch.full((rows, sizes.capacity), MAX_VOCAB, dtype=torch.int32, device=device)
    values = torch.full((rows, sizes.capacity), torch.nan, device=device)
    least, mass = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in "12")
    _kth_kernel[(rows,)](
        memory[0],
        memory[1],
        touched,
        tile_best,
        peaks,
        ids,
        values,
        torch.tensor(top_k, device=device),
        temperatures,
        least,
        mass,
        memory.stride(1),
        vocab,
        tiles,
        num_peaks,
        TILES_PAD=triton.next_power_of_2(tiles),
        PEAKS_PAD=triton.next_power_of_2(tiles) * (sizes.tile // sizes.group),
        CAPACITY=sizes.capacity,
        CHUNK=sizes.tile,
    )
    return least, mass


def check(
    logits: Tensor, top_k: list[int], sizes: Sizes, temperature: float = 1.0, touched: Tensor | None = None
) -> Tensor:
    """Assert that ranks are exact and masses right; return the masses."""
    temperatures = torch.full((len(logits),), temperature, device=logits.device)
    least, mass = found(logits, top_k, temperatures, sizes, touched)
    order = order_of(logits)
    last = torch.tensor(top_k, device=logits.device)[:, None] - 1
    assert torch.equal(least, rank_of(logits).gather(1, order.gather(1, last))[:, 0])
    ordered = logits.double().gather(1, order)
    weights = ((ordered - ordered[:, :1]) / temperature).exp()
    exact = weights.masked_fill(torch.arange(logits.shape[1], device=logits.device) > last, 0).sum(1)
    # The relative error of a weight is about 2^-22, and rounding to fixed point loses less than a unit.
    units = torch.tensor(top_k, device=logits.device) / ONE.value
    assert ((mass.double() / ONE.value - exact).abs() <= 2e-6 * exact + units).all()
    return mass


def randoms(rows: int, vocab: int, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * scale


@pytest.mark.parametrize("vocab", [2, 63, 65, 201])
def test_the_kth_token_is_that_of_a_sort(vocab: int, device: str) -> None:
    top_k = sorted({1, 2, vocab // 2, vocab - 1, max(1, vocab - 2)} - {vocab})
    check(randoms(len(top_k), vocab).to(device), top_k, Sizes())


def test_equal_logits_at_the_boundary_stay_by_lower_id(device: str) -> None:
    """Including equal zeros of both signs, all equal logits, and a boundary between tiles."""
    logits = randoms(5, 201).round()
    logits[1] = 1.5
    logits[2] = torch.where(torch.arange(201) % 2 == 0, 0.0, -0.0)
    logits[3, 100:] = logits[3].amax() + 1
    logits[4, ::2] = -torch.inf
    for top_k in ([20, 64, 65, 101, 100], [1, 128, 3, 2, 200], [150, 200, 129, 102, 101]):
        check(logits.to(device), top_k, Sizes())


def test_a_row_of_few_tokens_keeps_the_first_that_are_left(device: str) -> None:
    """The k-th has no probability: ranks of -inf still differ by id, and the mass is that of all tokens."""
    logits = torch.full((3, 150), -torch.inf, device=device)
    logits[0, 149], logits[1, [3, 140]], logits[2, 70:75] = -2.0, 1.0, 0.0
    mass = check(logits, [2, 149, 40], Sizes())
    assert mass.tolist() == [1 << 40, 2 << 40, 5 << 40]


def test_masses_do_not_depend_on_where_the_tokens_are_found(device: str) -> None:
    """They are bitwise equal whether few tokens are gathered or the whole row is searched."""
    logits = randoms(4, 333, 1.0).to(device)
    top_k = [1, 30, 33, 332]
    masses = [check(logits, top_k, Sizes(64, group, capacity)) for group, capacity in ((8, 512), (8, 2), (64, 64))]
    masses += [check(logits, top_k, Sizes(128, 16, 32))]
    assert all(torch.equal(masses[0], other) for other in masses)


def test_more_than_2048_tokens_are_found_over_the_whole_row(device: str) -> None:
    """With the production sizes, the tokens fit in the gathered buffer."""
    assert CAPACITY == 2048
    logits = randoms(2, 4501).to(device)
    logits[1] = logits[1].round()
    check(logits, [CAPACITY + 1, 4500], Sizes(TILE, GROUP, CAPACITY))


def test_logits_after_adjustments_are_read_where_they_are(device: str) -> None:
    logits = randoms(4, 130).to(device)
    touched = torch.tensor([0, 1, 1, 0], dtype=torch.int32, device=device)
    check(logits, [7, 7, 100, 100], Sizes(capacity=16), touched=touched)


@pytest.mark.parametrize("temperature", [2.0**-149, 1e-3, 1e30])
def test_masses_are_sound_at_every_temperature(temperature: float, device: str) -> None:
    """The coldest gives each of the best tokens a weight of 1, the hottest gives it to all."""
    logits = randoms(2, 140).to(device)
    logits[1, [3, 70]] = 90.0
    mass = check(logits, [9, 9], Sizes(), temperature)
    if temperature < 1e-3:
        assert mass.tolist() == [1 << 40, 2 << 40]
