"""Sizes of the scratch buffers, and of the launches that share them."""

import pytest
import torch

from tandem.engine_core.kernels.sampling.scratch import SamplingScratch, num_warps_for
from tandem.engine_core.sampling.triton_sampler import CAPACITY, GROUP, TILE


def allocate(vocab: int, rows: int, tile: int = 64, segment: int = 16, pdl: bool = False) -> SamplingScratch:
    return SamplingScratch.allocate(vocab, rows, tile, segment, 8, 32, torch.device("cpu"), pdl)


@pytest.mark.parametrize(("vocab", "tiles"), [(1, 1), (64, 1), (65, 2), (191, 3), (257, 5)])
def test_every_token_of_an_odd_vocabulary_has_its_index(vocab: int, tiles: int) -> None:
    scratch = allocate(vocab, 3)
    assert (scratch.num_tiles, scratch.max_batch, scratch.grid(2)) == (tiles, 3, (tiles, 2))
    assert vocab <= scratch.marks.shape[1] == scratch.adjusted.shape[1] < vocab + 64
    assert scratch.marks.stride() == scratch.adjusted.stride()
    assert scratch.masses.shape == scratch.retry_masses.shape == (3, tiles * 4)
    assert scratch.peaks.shape == (3, tiles, 8)


def test_buffers_that_kernels_expect_empty_begin_so() -> None:
    scratch = allocate(100, 2)
    assert scratch.winner.tolist() == [-(2**62)] * 2
    assert not scratch.arrivals.any() and not scratch.marks.any()


def test_a_row_takes_about_8_bytes_for_each_token() -> None:
    vocab = 131_072
    sizes = [SamplingScratch.allocate(vocab, rows, TILE, 1024, GROUP, CAPACITY, torch.device("cpu")) for rows in (1, 3)]
    row = (sizes[1].num_bytes - sizes[0].num_bytes) / 2
    assert sizes[0].num_bytes == row
    assert 8 * vocab < row < 8.5 * vocab


@pytest.mark.parametrize(
    ("vocab", "segment", "tiles", "pad"), [(1, 64, 1, 4), (64, 16, 1, 4), (65, 16, 2, 8), (150, 64, 4, 4)]
)
def test_noise_for_segments_comes_for_at_least_four(vocab: int, segment: int, tiles: int, pad: int) -> None:
    sizes = allocate(vocab, 1, segment=segment).segment_sizes()
    assert sizes == {"TILES_PAD": tiles, "PAD": pad, "PER_TILE": 64 // segment, "SEGMENT": segment}


def test_launches_are_chained_only_where_the_gpu_can() -> None:
    assert allocate(9, 1).launch_options(4) == {"PDL": False, "num_warps": 4}
    assert allocate(9, 1, pdl=True).launch_options(4) == {"PDL": True, "num_warps": 4, "launch_pdl": True}


@pytest.mark.parametrize(("block", "per_thread", "warps"), [(16, 32, 1), (2048, 32, 2), (4096, 16, 8), (2**20, 32, 8)])
def test_programs_have_one_to_eight_warps(block: int, per_thread: int, warps: int) -> None:
    assert num_warps_for(block, per_thread) == warps
