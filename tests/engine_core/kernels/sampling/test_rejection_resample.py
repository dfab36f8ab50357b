"""Full-mode sampling in Triton: the oracle's kept tokens and the oracle's draw."""

from dataclasses import replace

import pytest
import torch

from tandem.engine_core.kernels.reference.sampling import CANDIDATES, sample
from tandem.engine_core.kernels.sampling.scratch import SamplingScratch
from tandem.engine_core.sampling.sampler import Mode
from tandem.engine_core.sampling.triton_sampler import TritonSampler
from tests.support.sampling_case import (
    REPETITION,
    TEMPERATURE,
    Case,
    ask_everything,
    check_full,
    make_case,
    run,
    truncations,
)

# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SIZES = {"tile": 128, "segment": 32, "group": 8, "capacity": 32}


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [([0], [0.02, 0.1, 0.3], [0.0]), ([3, 9], [1.0], [0.0]), ([12, 5], [0.3, 0.6], [0.0]), ([0, 6], [0.2, 1.0], [0.9])],
)
def test_rows_that_truncate_much_draw_until_a_token_stays(
    top_k: list[int], top_p: list[float], min_p: list[float], device: str
) -> None:
    """From fewer tokens each time, which the oracle sorts and the kernels never do."""
    case = make_case(6, 200, seed=21, scale=0.3)
    truncations(case, top_k, top_p, min_p)
    draws = check_full(case.to(device), seeds=3, **SIZES)
    assert any(count > CANDIDATES for count in draws)
    assert any(count <= CANDIDATES for count in draws) or max(top_p) < 0.5


def test_a_tile_that_the_vocabulary_fills_and_one_that_it_does_not(device: str) -> None:
    for vocab in (128, 129, 257):
        case = make_case(3, vocab, seed=vocab, scale=1.0)
        truncations(case, [0, 7], [0.4, 0.9], [0.0])
        check_full(case.to(device), **SIZES)


@pytest.mark.parametrize("scale", [0.05, 3.0])
def test_top_p_keeps_and_draws_as_the_oracle(scale: float, device: str) -> None:
    case = make_case(5, 200, seed=1, scale=scale)
    truncations(case, [0], [0.0, 0.3, 0.9, 0.99, 0.999], [0.0])
    check_full(case.to(device), **SIZES)


def test_top_k_top_p_and_min_p_apply_in_order(device: str) -> None:
    case = make_case(8, 200, seed=2)
    truncations(case, [1, 5, 0, 17, 400], [1.0, 0.5, 0.95], [0.0, 0.02, 0.3, 1.0])
    check_full(case.to(device), **SIZES)


def test_equal_logits_at_the_cutoff_stay_by_lower_id(device: str) -> None:
    case = make_case(4, 200, seed=3)
    case.logits = case.logits.round()
    truncations(case, [3, 0, 40, 0], [0.37, 0.81, 1.0], [0.0])
    case.floats[:, TEMPERATURE] = 1.3
    check_full(case.to(device), **SIZES)


@pytest.mark.parametrize("capacity", [2, 8])
def test_top_k_is_exact_with_more_equal_logits_than_capacity(capacity: int, device: str) -> None:
    case = make_case(4, 200, seed=4)
    case.logits[:2] = 1.5
    case.logits[2, 20:] = -torch.inf
    truncations(case, [0, 30, 0, 150, 12], [0.62, 0.9], [0.0])
    check_full(case.to(device), **(SIZES | {"capacity": capacity}))


def test_top_k_beyond_capacity_is_exact_with_and_without_equal_logits(device: str) -> None:
    """The whole row is searched, by rank."""
    case = make_case(2, 120, seed=13)
    case.logits[1] = case.logits[1].round()
    truncations(case, [60], [0.6, 1.0], [0.0])
    check_full(case.to(device), **(SIZES | {"capacity": 4}))


def test_far_outliers_change_no_token(device: str) -> None:
    case = make_case(4, 200, seed=5)
    case.logits[:, ::3] = -1e30
    case.logits[:2, 5] = 60.0
    truncations(case, [0, 4], [0.9, 0.2], [0.0])
    case.floats[case.rows[0].long(), TEMPERATURE] = 1e-44
    case.floats[case.rows[3].long(), TEMPERATURE] = 1e30
    check_full(case.to(device), **SIZES)


def test_bias_penalties_and_suppression_equal_the_oracle(device: str) -> None:
    case = make_case(5, 140, seed=6)
    ask_everything(case)
    check_full(case.to(device), **SIZES)


@pytest.mark.parametrize("vocab", [65])
def test_all_parameters_under_a_mask_equal_the_oracle(vocab: int, device: str) -> None:
    case = make_case(5, vocab, seed=7)
    ask_everything(case)
    truncations(case, [0, 9, 0, 30], [0.8, 1.0, 0.95], [0.0, 0.05])
    generator = torch.Generator().manual_seed(8)
    words = torch.randint(-(2**31), 2**31, (5, -(-vocab // 32)), generator=generator)
    case.allowed = words.int()
    check_full(case.to(device), **SIZES)


def test_a_fully_masked_row_samples_id_0_and_changes_no_other_row(device: str) -> None:
    case = make_case(4, 140, seed=11)
    truncations(case, [0, 9], [0.8, 1.0], [0.0])
    case.allowed = torch.full((4, 5), -1, dtype=torch.int32)
    case = case.to(device)
    tokens, sampler = case.tokens.clone(), case.sampler(**SIZES)
    before = run(sampler, case, Mode.FULL)
    case.tokens[:] = tokens
    assert case.allowed is not None
    case.allowed[2] = 0
    after = run(sampler, case, Mode.FULL)
    assert after[2] == sample(case.logits, case.sampling_rows(True), case.allowed)[2] == 0
    others = [0, 1, 3]
    assert torch.equal(before[others], after[others])


@pytest.mark.parametrize("vocab", [140])
def test_masks_for_some_rows(vocab: int, device: str) -> None:
    """Rows without a constraint have all-ones masks and draw the same tokens as in a step without masks."""
    case = make_case(4, vocab, seed=12).to(device)
    tokens, sampler = case.tokens.clone(), case.sampler(**SIZES)
    free = run(sampler, case, Mode.FULL)
    case.allowed = torch.full((4, -(-vocab // 32)), -1, dtype=torch.int32, device=device)
    case.allowed[[1, 3]] = torch.tensor([1 << 7, 3, 0, 1 << 30, 0], dtype=torch.int32, device=device)
    case.tokens[:] = tokens
    masked = run(sampler, case, Mode.FULL)
    others = [0, 2]
    assert torch.equal(masked[others], free[others])
    assert set(masked[[1, 3]].tolist()) <= {7, 32, 33, 126}
    case.tokens[:] = tokens
    check_full(case, **SIZES)


def test_a_token_listed_twice_gets_both_biases(device: str) -> None:
    case = make_case(2, 100, seed=9)
    row = int(case.rows[0])
    case.floats[row, TEMPERATURE] = 0
    case.bias[0, row, :3] = torch.tensor([50, 3, 50])
    case.bias[1, row, :3] = torch.tensor([40.0, 60.0, 40.0]).view(torch.int32)
    moved = case.to(device)
    assert run(moved.sampler(**SIZES), moved, Mode.FULL)[0] == 50


def test_neither_the_batch_nor_another_step_changes_a_row(device: str) -> None:
    case = make_case(4, 200, seed=10)
    ask_everything(case)
    truncations(case, [0, 20, 0], [0.9, 0.7], [0.0, 0.01])
    case = case.to(device)
    tokens, sampler = case.tokens.clone(), case.sampler(**SIZES)
    together = run(sampler, case, Mode.FULL)
    for index in (0, 3):
        one = slice(index, index + 1)
        parts = (case.rows[one], case.positions[one], case.logits[one])
        case.tokens[:] = tokens
        alone = Case(case.tokens, case.ints, case.floats, case.bias, case.suppressed, case.lengths, *parts)
        assert run(sampler, alone, Mode.FULL).item() == together[index]


@pytest.mark.parametrize("left", [torch.nan, 1000.0])
def test_nothing_that_earlier_steps_left_in_the_scratch_is_read(left: float, device: str) -> None:
    """Rows with and without each truncation skip different buffers, and padding skips all."""
    case = make_case(9, 200, seed=14, scale=0.5)
    case.logits[1::2, :128] -= 40.0  # The tile ranks behind every drawn token.
    ask_everything(case)
    truncations(case, [0, 0, 20, 3], [0.3, 1.0, 0.9], [0.0, 0.2])
    case.rows[4], case.positions[4] = 0, 0
    case = case.to(device)
    tokens = case.tokens.clone()
    expected = run(case.sampler(**SIZES), case, Mode.FULL)
    case.tokens[:] = tokens
    sampler = case.sampler(**SIZES)
    scratch = sampler.scratch
    for buffer in (scratch.adjusted, scratch.ahead, scratch.counts, scratch.retry_masses, scratch.peaks):
        buffer.fill_(left)
    for buffer in (scratch.tile_best, scratch.masses):
        buffer.fill_(1 << 61)
    for buffer in (scratch.touched, scratch.candidates, scratch.found_ids):
        buffer.fill_(1)
    assert torch.equal(run(sampler, case, Mode.FULL), expected)


def test_only_rows_with_a_mask_of_their_own_are_adjusted(device: str) -> None:
    """The masks of the others are not read."""
    case = make_case(5, 150, seed=4)
    case.floats[case.rows[4].long(), REPETITION] = 1.5
    case.allowed = torch.full((5, 5), -1, dtype=torch.int32)
    case.allowed[2] = torch.tensor([1 << 7, 3, 0, 1 << 30, 0])
    case = case.to(device)
    expected = run(case.sampler(**SIZES), case, Mode.FULL)
    sampler, sampled = case.sampler(**SIZES), torch.zeros_like(case.rows)
    masked = torch.tensor([0, 0, 1, 0, 0], dtype=torch.int32, device=device)
    sampler.launch(Mode.MASKED, replace(case.batch(sampled, allowed=case.allowed), masked=masked))
    assert torch.equal(sampled, expected)
    assert sampler.scratch.touched.tolist() == [0, 0, 1, 0, 1]


@pytest.mark.parametrize("mode", list(Mode))
def test_more_rows_than_are_sampled_at_once_give_the_same_tokens(mode: Mode, device: str) -> None:
    case = make_case(7, 150, seed=6)
    ask_everything(case)
    truncations(case, [0, 20, 0], [0.9, 0.7, 1.0], [0.0, 0.01])
    case = case.to(device)
    allowed = None
    if mode is Mode.MASKED:
        allowed = torch.full((7, 5), -1, dtype=torch.int32, device=device)
        allowed[[1, 5]] = torch.tensor([1 << 7, 3, 0, 1 << 30, 0], dtype=torch.int32, device=device)
    scratch = SamplingScratch.allocate(150, 3, 128, 32, 8, 32, torch.device(device))
    found, expected = torch.zeros_like(case.rows), torch.zeros_like(case.rows)
    case.sampler(**SIZES).launch(mode, case.batch(expected, allowed=allowed))
    masked = None if allowed is None else torch.tensor([0, 1, 0, 0, 0, 1, 0], dtype=torch.int32, device=device)
    few = TritonSampler(case.tables, scratch)
    few.launch(mode, replace(case.batch(found, allowed=allowed), masked=masked))
    assert torch.equal(found, expected)
