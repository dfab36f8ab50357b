"""The Triton argmax of every row."""

from dataclasses import replace

import pytest
import torch

from tandem.engine_core.sampling.sampler import Mode
from tandem.engine_core.sampling.triton_sampler import TritonSampler
from tests.support.sampling_case import (
    MIN_P,
    MIN_TOKENS,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    expect_tokens,
    make_case,
    run,
    truncations,
)

# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SIZES = {"tile": 64, "segment": 32, "group": 8, "capacity": 32}


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 300])
def test_greedy_samples_the_argmax(vocab: int, device: str) -> None:
    case = make_case(5, vocab).to(device)
    assert torch.equal(run(case.sampler(**SIZES), case, Mode.GREEDY).long(), case.logits.argmax(-1))


def test_equal_logits_yield_the_lowest_id(device: str) -> None:
    case = make_case(4, 200).to(device)
    case.logits[0] = 2.0
    case.logits[1, [70, 199]] = 50.0
    case.logits[2] = -0.0
    case.logits[2, 100] = 0.0
    case.logits[3] = -torch.inf
    case.logits[3, [130, 190]] = -1e30
    assert run(case.sampler(**SIZES), case, Mode.GREEDY).tolist() == [0, 70, 0, 130]


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.UNTRUNCATED, Mode.FULL])
def test_rows_without_a_distribution_yield_no_token_in_any_mode(mode: Mode, device: str) -> None:
    """Every kind of invalid row, each next to a valid one, and with the rows' own parameters in full mode."""
    case = make_case(12, 150)
    truncations(case, [0, 5, 0, 200], [0.9, 1.0], [0.0, 0.05])
    case.floats[:6, TEMPERATURE] = 0
    if mode is not Mode.FULL:
        case.ints[:, TOP_K], case.floats[:, TOP_P], case.floats[:, MIN_P] = 0, 1, 0
    case = case.to(device)
    sound = run(case.sampler(**SIZES), case, mode)
    case.logits[1, 0] = torch.nan
    case.logits[3, 149] = torch.nan
    case.logits[5] = torch.nan
    case.logits[7] = -torch.inf
    case.logits[9, 100] = torch.inf
    case.logits[11] = -torch.inf
    case.logits[11, 70] = torch.nan
    assert (expect_tokens(case, mode) == -1).tolist() == [False, True] * 6
    found = run(case.sampler(**SIZES), case, mode)
    assert found[1::2].tolist() == [-1] * 6
    assert torch.equal(found[::2], sound[::2]), "a broken row changed another"


def test_a_nan_is_found_behind_masks_suppression_and_bias(device: str) -> None:
    """Only the model's own logits matter: a mask that leaves nothing yields id 0, which the grammar rejects."""
    vocab = 300
    case = make_case(6, vocab)
    for row in case.rows[:3].tolist():
        case.bias[0, row, 0], case.bias[1, row, 0] = 7, torch.tensor(3.0).view(torch.int32)
        case.suppressed[row, 0] = 9
        case.ints[row, MIN_TOKENS] = 1000
    case.floats[case.rows[1].long(), REPETITION] = 1.5
    case.logits[0, 9] = torch.nan
    case.logits[1, 150] = torch.nan
    case.logits[2, 7] = torch.nan
    case.logits[4] = -torch.inf
    case.allowed = torch.full((6, -(-vocab // 32)), -1, dtype=torch.int32)
    case.allowed[1] = 0
    case.allowed[1, 0] = 1 << 4
    case.allowed[3:5] = 0
    case = case.to(device)
    found = run(case.sampler(**SIZES), case, Mode.FULL)
    assert found.tolist()[:5] == [-1, -1, -1, 0, -1]
    assert torch.equal(expect_tokens(case, Mode.FULL, SIZES["segment"]), found.long())


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
    with pytest.raises(ValueError, match=r"\(3, 99\) for 3 rows\b.* 100$"):
        sampler.launch(Mode.FULL, replace(batch, logits=case.logits[:, :99]))
    with pytest.raises(ValueError, match=r"\(6, 100\) for 3 rows\b.* 100$"):
        sampler.launch(Mode.UNTRUNCATED, replace(batch, logits=torch.cat((case.logits, case.logits))))


def test_scratch_does_not_grow_beyond_the_rows_that_are_sampled_at_once() -> None:
    tables = make_case(3, 100).tables
    sizes = [TritonSampler.allocate(tables, 1000, rows, pdl=False).scratch.num_bytes for rows in (64, 256, 512, 2048)]
    assert sizes[0] < sizes[1] == sizes[2] == sizes[3]
