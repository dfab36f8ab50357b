"""Log-probabilities and top tokens in Triton against the oracle, and the oracle against torch."""

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.reference.sampling import logprob_records
from tandem.engine_core.kernels.sampling.logprobs import TritonScorer

# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MAX_TOP = 20


def found(logits: Tensor, chosen: Tensor, top: int, tile: int = 64) -> Tensor:
    lines = torch.full((len(logits), 1 + 2 * top), -77, dtype=torch.int32, device=logits.device)
    kernels = TritonScorer(logits.shape[1], len(logits), MAX_TOP, logits.device, tile)
    kernels.run(logits, chosen, top, lines)
    return lines


def values(lines: Tensor, top: int) -> Tensor:
    return lines[:, : 1 + top].contiguous().view(torch.float32)


def check(logits: Tensor, chosen: Tensor, top: int) -> None:
    """Ids equal, values within 1e-5 of the oracle."""
    mine, oracle = found(logits, chosen, top), logprob_records(logits, chosen, top)
    assert torch.equal(mine[:, 1 + top :], oracle[:, 1 + top :])
    torch.testing.assert_close(values(mine, top), values(oracle, top), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(("vocab", "top"), [(1, 0), (1, 1), (20, 20), (64, 3), (333, 20), (333, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_records_equal_the_oracle(vocab: int, top: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(4, vocab, generator=generator) * 20).to(device, dtype)
    chosen = torch.randint(0, vocab, (4,), generator=generator).int().to(device)
    check(logits, chosen, top)


def test_the_oracle_equals_log_softmax() -> None:
    logits = torch.randn(16, 500, generator=torch.Generator().manual_seed(1)) * 5
    chosen = torch.arange(16) * 7
    lines = logprob_records(logits, chosen, 5)
    expected = logits.double().log_softmax(-1)
    best = expected.topk(5)
    assert torch.equal(lines[:, 6:].long(), best.indices)
    wanted = torch.cat([expected.gather(1, chosen[:, None]), best.values], 1)
    assert (values(lines, 5) - wanted).abs().max() < 1e-5


def test_equal_logits_rank_by_the_lowest_id(device: str) -> None:
    logits = torch.zeros(3, 200, device=device)
    logits[1, [150, 70, 3]] = 2.0
    logits[2, ::2] = -0.0
    chosen = torch.tensor([199, 3, 1], dtype=torch.int32, device=device)
    for lines in (found(logits, chosen, 5), logprob_records(logits, chosen, 5)):
        assert lines[:, 6:].tolist() == [[0, 1, 2, 3, 4], [3, 70, 150, 0, 1], [0, 1, 2, 3, 4]]


def test_tokens_without_probability_score_minus_infinity(device: str) -> None:
    logits = torch.zeros(3, 100, device=device)
    logits[0, 2:] = -torch.inf
    logits[1, ::2] = torch.nan
    logits[2] = -torch.inf
    chosen = torch.tensor([50, 1, 0], dtype=torch.int32, device=device)
    check(logits, chosen, 3)
    low = -torch.inf
    lines = values(logprob_records(logits, chosen, 3), 3)
    expected = torch.tensor([[0, 0.5, 0.5, 0], [0.02] * 4, [0] * 4], device=device).log()
    assert torch.equal(lines == low, expected == low)
    assert not lines.isnan().any()
    torch.testing.assert_close(lines, expected, atol=1e-5, rtol=0)


def test_rows_without_a_token_score_minus_infinity_for_it(device: str) -> None:
    logits = torch.zeros(3, 100, device=device)
    logits[0] = torch.nan
    chosen = torch.tensor([-1, -1, 4], dtype=torch.int32, device=device)
    check(logits, chosen, 2)
    lines = values(found(logits, chosen, 2), 2)
    assert lines[:, 0].isneginf().tolist() == [True, True, False]
    assert (lines[1, 1:] > -5).all()


def test_a_row_is_the_same_in_every_batch(device: str) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(3)).to(device)
    chosen = torch.arange(6, dtype=torch.int32, device=device)
    together = found(logits, chosen, 4)
    for row in range(6):
        assert torch.equal(found(logits[row : row + 1], chosen[row : row + 1], 4), together[row : row + 1])


def test_a_call_ignores_scratch_of_earlier_calls(device: str) -> None:
    generator = torch.Generator().manual_seed(4)
    kernels = TritonScorer(130, 4, MAX_TOP, torch.device(device), tile=64)
    for rows, top in ((4, 20), (2, 3), (3, 7), (0, 1)):
        logits = torch.randn(rows, 130, generator=generator).to(device)
        chosen = torch.zeros(rows, dtype=torch.int32, device=device)
        lines = torch.zeros(rows, 1 + 2 * top, dtype=torch.int32, device=device)
        kernels.run(logits, chosen, top, lines)
        assert torch.equal(lines, found(logits, chosen, top))


@pytest.mark.parametrize(("rows", "vocab", "top"), [(5, 64, 1), (1, 65, 1), (1, 64, 21), (1, 64, -1)])
def test_run_raises_for_sizes_that_do_not_fit(rows: int, vocab: int, top: int, device: str) -> None:
    kernels = TritonScorer(64, 4, MAX_TOP, torch.device(device))
    logits = torch.zeros(rows, vocab, device=device)
    with pytest.raises(ValueError, match=f"{top} alternatives"):
        kernels.run(logits, torch.zeros(rows, dtype=torch.int32), top, torch.zeros(rows, 41, dtype=torch.int32))


def test_only_the_rows_asked_for_get_their_records(device: str) -> None:
    logits = torch.randn(6, 333, generator=torch.Generator().manual_seed(3)).to(device)
    chosen = torch.arange(6, dtype=torch.int32, device=device)
    lines = torch.full((6, 7), -77, dtype=torch.int32, device=device)
    index = torch.tensor([4, 1], dtype=torch.int32, device=device)
    TritonScorer(333, 6, MAX_TOP, logits.device, 64).run(logits, chosen, 3, lines, index)
    assert (lines[[0, 2, 3, 5]] == -77).all()
    assert torch.equal(lines[[1, 4]], found(logits, chosen, 3)[[1, 4]])
