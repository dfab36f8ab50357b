"""The Triton argmax of every row."""

from dataclasses import replace

import pytest
import torch

from tandem.engine_core.sampling.sampler import Mode
from tests.support.sampling_case import make_case, run

# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SIZES = {"tile": 64, "group": 8, "capacity": 32}


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 300])
def test_greedy_samples_the_argmax(vocab: int, device: str) -> None:
    case = make_case(5, vocab).to(device)
    assert torch.equal(run(case.sampler(**SIZES), case, Mode.GREEDY).long(), case.logits.argmax(-1))


def test_equal_logits_yield_the_lowest_id_and_nan_is_least(device: str) -> None:
    case = make_case(6, 200).to(device)
    case.logits[0] = 2.0
    case.logits[1, :] = -torch.inf
    case.logits[2, [70, 199]] = 50.0
    case.logits[3, :] = torch.nan
    case.logits[4, ::2] = torch.nan
    case.logits[5] = -0.0
    case.logits[5, 100] = 0.0
    expected = case.logits.nan_to_num(nan=-torch.inf).argmax(-1)
    assert expected.tolist()[:4] == [0, 0, 70, 0]
    assert torch.equal(run(case.sampler(**SIZES), case, Mode.GREEDY).long(), expected)


def test_padding_rows_sample_id_0_and_write_nothing_else(device: str) -> None:
    case = make_case(4, 100).to(device)
    case.rows[2:] = 0
    case.positions[2:] = 0
    for mode in ("greedy", "plain", Mode.FULL):
        assert run(case.sampler(**SIZES), case, mode)[2:].tolist() == [0, 0]


def test_a_token_past_the_end_of_the_table_is_not_written(device: str) -> None:
    case = make_case(2, 100, max_len=8).to(device)
    case.positions[:] = 7
    before = case.tokens.clone()
    sampled = torch.zeros_like(case.rows)
    case.sampler(**SIZES).launch(Mode.GREEDY, case.batch(sampled))
    assert torch.equal(case.tokens, before)
    assert torch.equal(sampled.long(), case.logits.argmax(-1))


def test_launch_raises_for_masks_and_logits_that_do_not_fit(device: str) -> None:
    case = make_case(3, 100).to(device)
    sampler = case.sampler(**SIZES)
    sampled, mask = torch.zeros_like(case.rows), torch.zeros(3, 4, dtype=torch.int32, device=device)
    batch = case.batch(sampled)
    for mode in (Mode.GREEDY, Mode.UNTRUNCATED, Mode.FULL):
        with pytest.raises(ValueError, match=f"{mode.value} ignores masks"):
            sampler.launch(mode, replace(batch, allowed=mask))
    with pytest.raises(ValueError, match="contiguous"):
        sampler.launch(Mode.GREEDY, replace(batch, logits=case.logits.t().contiguous().t()))
    with pytest.raises(ValueError, match="float32"):
        sampler.launch(Mode.GREEDY, replace(batch, logits=case.logits.double()))
    with pytest.raises(ValueError, match="do not fit"):
        sampler.launch(Mode.FULL, replace(batch, logits=case.logits[:, :99]))
    with pytest.raises(ValueError, match="do not fit"):
        sampler.launch(Mode.UNTRUNCATED, replace(batch, logits=torch.cat((case.logits, case.logits))))
