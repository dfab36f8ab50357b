"""Draws from the whole softmax in Triton: the oracle's integers, noise and tokens."""

import pytest
import torch
import triton
import triton.language as tl

from tandem.engine_core.kernels.reference.philox import MASK, gumbel_noise, philox
from tandem.engine_core.kernels.sampling.gumbel import gumbel, philox_words
from tandem.engine_core.kernels.sampling.weights import UNIT, segment_masses
from tandem.engine_core.sampling.sampler import Mode
from tests.support.sampling_case import TEMPERATURE, check_draw, make_case, run

# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SIZES = {"tile": 128, "segment": 32, "group": 8, "capacity": 32}


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
    """Where the noise is largest a careless logarithm would be off by a tenth."""
    near = torch.arange(512, device=device) << 9
    words = torch.cat((near, MASK - near))
    noise = torch.zeros(1024, device=device)
    _gumbel_kernel[(1,)](words, noise, BLOCK=1024)
    u = ((words >> 9).double() + 0.5) * 2.0**-23
    torch.testing.assert_close(noise.double(), -(-u.log()).log(), atol=4e-6, rtol=0)


@triton.jit
def _masses_kernel(weights, masses, COUNT: tl.constexpr, SEGMENT: tl.constexpr):  # noqa: N803
    values = tl.load(weights + tl.arange(0, COUNT * SEGMENT))
    tl.store(masses + tl.arange(0, COUNT), segment_masses(values, COUNT, SEGMENT))


def test_masses_of_segments_are_exact_sums_of_rounded_weights(device: str) -> None:
    """So no order of addition can change them. A full segment of ones is the most that a sum has to hold."""
    weights = torch.rand(4, 1024, device=device).pow(8)
    weights[0], weights[1, 5:] = 1, 2.0**-40
    masses = torch.zeros(4, dtype=torch.int64, device=device)
    _masses_kernel[(1,)](weights, masses, COUNT=4, SEGMENT=1024)
    assert masses.tolist() == (weights.double() / UNIT.value).round().long().sum(1).tolist()


@pytest.mark.parametrize("vocab", [1, 64, 200])
def test_untruncated_tokens_equal_the_oracle(vocab: int, device: str) -> None:
    case = make_case(6, vocab, seed=vocab).to(device)
    case.floats[::3, TEMPERATURE] = 0
    check_draw(case, Mode.UNTRUNCATED, run(case.sampler(**SIZES), case, Mode.UNTRUNCATED), SIZES["segment"])


def test_rows_without_a_choice_sample_their_only_token(device: str) -> None:
    case = make_case(5, 200).to(device)
    case.logits[0] = -torch.inf
    case.logits[0, 199] = -3e38
    case.logits[1] = -torch.inf
    case.logits[2, 77] = 3e38
    case.floats[case.rows[3].long(), TEMPERATURE] = 1e-44
    case.logits[4] = -torch.inf
    case.logits[4, 150] = -1e30
    expected = [199, -1, 77, int(case.logits[3].argmax()), 150]
    for mode in (Mode.UNTRUNCATED, Mode.FULL):
        assert run(case.sampler(**SIZES), case, mode).tolist() == expected


def test_full_mode_equals_untruncated_mode_for_neutral_rows(device: str) -> None:
    case = make_case(4, 200, seed=4).to(device)
    sampler = case.sampler(**SIZES)
    assert torch.equal(run(sampler, case, Mode.UNTRUNCATED), run(sampler, case, Mode.FULL))
