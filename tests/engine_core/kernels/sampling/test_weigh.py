"""Mass and number of the tokens ahead of each candidate, against sums over a sort."""

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.reference.sampling import CANDIDATES, is_ahead
from tandem.engine_core.kernels.sampling.draw import SETTLED
from tandem.engine_core.kernels.sampling.scratch import SamplingScratch
from tandem.engine_core.kernels.sampling.weigh import weigh
from tests.support.sampling_case import MIN_P, TEMPERATURE, TOP_K, TOP_P, Case, make_case
from tests.support.token_ranks import best_of_tiles, order_of

# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TILE = 64


def weighed(case: Case, candidates: Tensor, adjusted: Tensor | None = None) -> SamplingScratch:
    """Weigh the candidates of each row in scratch that holds NaN otherwise.

    adjusted: [S, V], rows of logits after adjustments, of which those without NaN take the place of the model's.
    """
    rows, vocab = case.logits.shape
    scratch = SamplingScratch.allocate(vocab, rows, TILE, 32, 8, 32, case.logits.device)
    scratch.candidates.copy_(candidates)
    scratch.adjusted.fill_(torch.nan)
    logits = case.logits
    if adjusted is not None:
        scratch.adjusted[:, :vocab] = adjusted
        is_adjusted = ~adjusted.isnan().any(1)
        scratch.touched.copy_(is_adjusted)
        logits = torch.where(is_adjusted[:, None], adjusted, logits)
    scratch.tile_best.copy_(best_of_tiles(logits, TILE))
    scratch.ahead.fill_(torch.nan)
    scratch.counts.fill_(torch.nan)
    weigh(case.batch(torch.zeros_like(case.rows)), case.tables, scratch)
    return scratch


def check(case: Case, candidates: Tensor, adjusted: Tensor | None = None) -> None:
    """Assert that the tokens ahead of each candidate are counted exactly and weighed right, tile by tile."""
    scratch = weighed(case, candidates, adjusted)
    logits = case.logits if adjusted is None else adjusted
    temperatures = case.floats[case.rows.long(), TEMPERATURE].double()[:, None]
    weights = ((logits.double() - logits.double().amax(1, keepdim=True)) / temperatures).exp()
    for number in range(CANDIDATES):
        ahead = is_ahead(logits, candidates[:, number].long()).double()
        empty = torch.zeros(len(logits), -logits.shape[1] % TILE, dtype=torch.float64, device=logits.device)
        tiles = torch.cat([ahead, empty], 1).unflatten(1, (-1, TILE))
        masses = torch.cat([ahead * weights, empty], 1).unflatten(1, (-1, TILE)).sum(-1)
        assert torch.equal(scratch.counts[:, :, number].double(), tiles.sum(-1))
        torch.testing.assert_close(scratch.ahead[:, :, number].double(), masses, rtol=2e-5, atol=1e-30)


def with_top_k(case: Case) -> Case:
    case.ints[:, TOP_K] = 5
    return case


def pick(logits: Tensor, places: list[int]) -> Tensor:
    """Return the tokens at these places of each row's order, as candidates."""
    return order_of(logits)[:, places].int()


@pytest.mark.parametrize("vocab", [64, 65, 129, 201])
def test_tokens_ahead_of_a_candidate_are_counted_and_weighed(vocab: int, device: str) -> None:
    """Of the first in rank, the last, and others, in tiles that lie before, at, and behind the candidate's own."""
    case = with_top_k(make_case(3, vocab, seed=vocab)).to(device)
    check(case, pick(case.logits, [0, vocab - 1, vocab // 2, 3]))


def test_equal_logits_are_ahead_by_lower_id(device: str) -> None:
    """Also in other tiles, where a logit just above is ahead whatever its id; and both zeros are equal."""
    case = with_top_k(make_case(4, 190, seed=1))
    case.logits = (case.logits / 2).round()
    case.logits[1] = 2.5
    case.logits[2] = torch.where(torch.arange(190) % 3 == 0, -0.0, 0.0)
    case.logits[2, [10, 100, 180]] = 2.0**-149
    case.logits[3] = 1.0
    case.logits[3, [0, 63, 64, 127, 128, 189]] = 1.0 + 2**-23
    case = case.to(device)
    tokens = torch.tensor([63, 64, 128, 189], dtype=torch.int32, device=device)
    check(case, tokens.expand(4, 4))
    check(case, (tokens - 1).expand(4, 4))


def test_a_tile_behind_all_candidates_has_nothing_ahead(device: str) -> None:
    """Not even garbage: its place is written although its tokens are not read."""
    case = with_top_k(make_case(2, 200, seed=3))
    case.logits[:, 64:128] -= 100.0
    case.logits[1, 128:] = -torch.inf
    case = case.to(device)
    check(case, pick(case.logits, [0, 1, 5, 20]))


def test_a_candidate_without_probability_has_all_others_ahead(device: str) -> None:
    case = with_top_k(make_case(1, 140, seed=4))
    case.logits[0, 70:] = -torch.inf
    case.floats[:, TEMPERATURE] = 0.5
    case = case.to(device)
    candidates = torch.tensor([[139, 70, 71, 3]], dtype=torch.int32, device=device)
    scratch = weighed(case, candidates)
    assert scratch.counts.sum(1)[0, :3].tolist() == [139.0, 70.0, 71.0]
    check(case, candidates)


def test_logits_after_adjustments_are_weighed_where_a_row_has_them(device: str) -> None:
    case = with_top_k(make_case(3, 130, seed=5)).to(device)
    adjusted = case.logits.roll(7, 1) - 1.0
    raw = case.logits.clone()
    case.logits[1] = 1e30
    partly = adjusted.clone()
    partly[[0, 2]] = torch.nan
    scratch = weighed(case, pick(adjusted, [2, 9, 30, 60]), partly)
    case.logits = torch.where(torch.arange(3, device=device)[:, None] == 1, adjusted, raw)
    again = weighed(case, pick(adjusted, [2, 9, 30, 60]))
    assert torch.equal(scratch.ahead, again.ahead) and torch.equal(scratch.counts, again.counts)


def test_only_what_truncation_needs_is_written(device: str) -> None:
    """Rows that are settled, rows with min-p alone, rows with top-p alone, rows with top-k, and padding."""
    case = make_case(6, 130, seed=6)
    rows = case.rows.long()
    case.ints[rows[[0, 3]], TOP_K] = 4
    case.floats[rows[[0, 2]], TOP_P] = 0.5
    case.floats[rows[1], MIN_P] = 0.1
    case.ints[rows[4], TOP_K] = 130
    case.rows[5], case.positions[5] = 0, 0
    case = case.to(device)
    candidates = pick(case.logits, [4, 0, 1, 2])
    candidates[[0, 5], 0] = SETTLED.value
    scratch = weighed(case, candidates)
    none = [0, 1, 4, 5]
    assert scratch.ahead[none].isnan().all() and scratch.counts[none].isnan().all()
    assert not scratch.ahead[2:4].isnan().any() and not scratch.counts[3].isnan().any()
    assert scratch.counts[3].sum(0).tolist() == [4.0, 0.0, 1.0, 2.0]
