"""Draws from the whole softmax in Triton: the oracle's tokens."""

import pytest
import torch

from tandem.engine_core.sampling.sampler import Mode
from tests.support.sampling_case import TEMPERATURE, check_draw, make_case, run

# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SIZES = {"tile": 128, "segment": 32, "group": 8, "capacity": 32}


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
