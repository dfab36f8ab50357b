"""Noise in Triton: the oracle's integers, and noise within its error bound."""

import pytest
import torch
import triton
import triton.language as tl

from tandem.engine_core.kernels.reference.philox import MASK, gumbel_noise, philox
from tandem.engine_core.kernels.sampling.gumbel import gumbel, philox_words

# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@triton.jit
def _noise_kernel(words, noise, seeds, choices, positions, BLOCK: tl.constexpr):  # noqa: N803
    index = tl.program_id(1)
    start = tl.program_id(0) * BLOCK
    seed, choice, position = tl.load(seeds + index), tl.load(choices + index), tl.load(positions + index)
    values = philox_words(seed, choice, position, 5 * index, start, BLOCK)
    place = index * tl.num_programs(0) * BLOCK + start + tl.arange(0, BLOCK)
    tl.store(words + place, values.to(tl.int64))
    tl.store(noise + place, gumbel(values))


def test_philox_integers_and_noise_equal_the_oracle(device: str) -> None:
    seeds = torch.tensor([0, 1, 2**62 + 12345, 2**63 - 1], device=device)
    choices = torch.tensor([0, 3, 127, 1], device=device)
    positions = torch.tensor([1, 2, 131071, 2**31 - 1], device=device)
    words = torch.zeros(4, 1024, dtype=torch.int64, device=device)
    noise = torch.zeros(4, 1024, device=device)
    _noise_kernel[(4, 4)](words, noise, seeds, choices, positions, BLOCK=256)
    block = torch.arange(256, device=device).expand(4, -1)
    streams = torch.arange(0, 20, 5, device=device)
    counter = (block, *(each[:, None].expand_as(block) for each in (positions, choices, streams)))
    expected = philox(counter, ((seeds & MASK)[:, None].expand_as(block), (seeds >> 32)[:, None].expand_as(block)))
    assert torch.equal(words, expected.flatten(1))
    for index, stream in enumerate(streams.tolist()):
        row = slice(index, index + 1)
        wanted = gumbel_noise(seeds[row], choices[row], positions[row], 1024, stream)
        torch.testing.assert_close(noise[row], wanted, atol=5e-6, rtol=0)


@triton.jit
def _gumbel_kernel(words, noise, BLOCK: tl.constexpr):  # noqa: N803
    places = tl.arange(0, BLOCK)
    tl.store(noise + places, gumbel(tl.load(words + places).to(tl.uint32)))


def test_noise_is_accurate_at_both_ends(device: str) -> None:
    """Where the noise is largest a naive logarithm would be off by 10 %."""
    near = torch.arange(512, device=device) << 9
    words = torch.cat((near, MASK - near))
    noise = torch.zeros(1024, device=device)
    _gumbel_kernel[(1,)](words, noise, BLOCK=1024)
    u = ((words >> 9).double() + 0.5) * 2.0**-23
    torch.testing.assert_close(noise.double(), -(-u.log()).log(), atol=4e-6, rtol=0)


@triton.jit
def _words_kernel(words, start, BLOCK: tl.constexpr):  # noqa: N803
    stream, seed = tl.full([], 6, tl.int32), tl.full([], 2**40 + 7, tl.int64)
    values = philox_words(seed, stream * 0 + 2, stream * 0 + 30, stream, start, BLOCK)
    tl.store(words + tl.arange(0, BLOCK), values.to(tl.int64))


def test_an_index_has_the_same_word_wherever_a_block_begins(device: str) -> None:
    """A draw uses the words of one segment, a slice of the oracle's row."""
    row, part = (torch.zeros(size, dtype=torch.int64, device=device) for size in (256, 16))
    _words_kernel[(1,)](row, 0, BLOCK=256)
    for start in (0, 4, 96, 240):
        _words_kernel[(1,)](part, start, BLOCK=16)
        assert torch.equal(part, row[start : start + 16])
    one = torch.zeros(4, dtype=torch.int64, device=device)
    _words_kernel[(1,)](one, 252, BLOCK=4)
    assert torch.equal(one, row[252:])
