"""Mass and number of the tokens ahead of candidates, against sums over a sort."""

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.reference.sampling import CANDIDATES, is_ahead
from tandem.engine_core.kernels.sampling.gumbel_draw import DONE
from tandem.engine_core.kernels.sampling.prefix_mass import prefix_mass
from tandem.engine_core.kernels.sampling.scratch import SamplingScratch
from tests.support.sampling_case import MIN_P, TEMPERATURE, TOP_K, TOP_P, Case, make_case
from tests.support.token_ranks import best_of_tiles, order_of, rank_of

# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TILE = 64


def weighed(case: Case, candidates: Tensor, adjusted: Tensor | None = None) -> SamplingScratch:
    """Run `prefix_mass` for the candidates of each row, with scratch that is NaN otherwise.

    candidates: [S, CANDIDATES] ids, the first -1 for a row that is done; adjusted: [S, V], rows of adjusted logits;
    those without NaN replace the model's.
    """
    count, vocab = case.logits.shape
    scratch = SamplingScratch.allocate(vocab, count, TILE, 32, 8, 32, case.logits.device)
    scratch.adjusted.fill_(torch.nan)
    scratch.mass_mode.fill_(1)
    logits = case.logits
    if adjusted is not None:
        scratch.adjusted[:, :vocab] = adjusted
        is_adjusted = ~adjusted.isnan().any(1)
        scratch.mass_mode.copy_(1 + is_adjusted.int())
        logits = torch.where(is_adjusted[:, None], adjusted, logits)
    ranks = rank_of(logits).gather(1, candidates.clamp(min=0).long())
    scratch.candidates.copy_(torch.where(candidates < 0, DONE.value, ranks))
    scratch.tile_best.copy_(best_of_tiles(logits, TILE))
    scratch.row_best.copy_(scratch.tile_best.amax(1))
    rows = case.rows.long()
    truncates = ((case.ints[rows, TOP_K] > 0) & (case.ints[rows, TOP_K] < vocab)) | (case.floats[rows, TOP_P] < 1)
    scratch.mass_mode[~truncates | (candidates[:, 0] < 0)] = 0
    scratch.ahead.fill_(torch.nan)
    scratch.counts.fill_(torch.nan)
    prefix_mass(case.batch(torch.zeros_like(case.rows)), case.tables, scratch)
    return scratch


def check(case: Case, candidates: Tensor, adjusted: Tensor | None = None) -> None:
    """Assert that the tokens ahead of candidates have exact counts and accurate masses, tile by tile.

    Nothing is written for a candidate that ranks behind an earlier one, nor for a tile without a token ahead.
    """
    scratch = weighed(case, candidates, adjusted)
    logits = case.logits if adjusted is None else adjusted
    temperatures = case.floats[case.rows.long(), TEMPERATURE].double()[:, None]
    weights = ((logits.double() - logits.double().amax(1, keepdim=True)) / temperatures).exp()
    ranks = rank_of(logits).gather(1, candidates.long())
    for number in range(CANDIDATES):
        ahead = is_ahead(logits, candidates[:, number].long()).double()
        empty = torch.zeros(len(logits), -logits.shape[1] % TILE, dtype=torch.float64, device=logits.device)
        tiles = torch.cat([ahead, empty], 1).unflatten(1, (-1, TILE))
        masses = torch.cat([ahead * weights, empty], 1).unflatten(1, (-1, TILE)).sum(-1)
        leads = (ranks[:, :number] < ranks[:, number : number + 1]).all(1, keepdim=True)
        written = leads & (tiles.sum(-1) > 0)
        counts, found = scratch.counts[:, :, number].double(), scratch.ahead[:, :, number].double()
        assert torch.equal(counts[written], tiles.sum(-1)[written])
        torch.testing.assert_close(found[written], masses[written], rtol=2e-5, atol=1e-30)
        assert counts[~written].isnan().all() and found[~written].isnan().all()


def with_top_k(case: Case) -> Case:
    case.ints[:, TOP_K] = 5
    return case


def pick(logits: Tensor, places: list[int]) -> Tensor:
    """Return the tokens at these ranks of each row, as candidates."""
    return order_of(logits)[:, places].int()


@pytest.mark.parametrize("vocab", [64, 65, 129, 201])
def test_tokens_ahead_of_a_candidate_are_counted_and_weighed(vocab: int, device: str) -> None:
    """Of the last in rank, the first, and others, in tiles before, of, and after the candidate's own."""
    case = with_top_k(make_case(3, vocab, seed=vocab)).to(device)
    check(case, pick(case.logits, [vocab - 1, vocab // 2, 3, 0]))


def test_a_candidate_behind_an_earlier_one_is_not_weighed(device: str) -> None:
    """It would be dropped like that one. A token that is drawn again is not ahead either."""
    case = with_top_k(make_case(4, 150, seed=2)).to(device)
    order = order_of(case.logits).int()
    places = [[9, 60, 4, 8], [60, 9, 9, 60], [0, 1, 2, 0], [3, 100, 5, 1]]
    candidates = torch.stack([order[row, at] for row, at in enumerate(places)])
    check(case, candidates)
    scratch = weighed(case, candidates)
    mass_mode = ~scratch.counts.isnan().all(1)
    assert mass_mode.int().tolist() == [[1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1]]


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
    for tokens in ([189, 128, 64, 63], [188, 127, 63, 62], [10, 100, 180, 9]):
        check(case, torch.tensor(tokens, dtype=torch.int32, device=device).expand(4, 4))


def test_a_tile_behind_all_candidates_has_nothing_ahead(device: str) -> None:
    """Its tokens are not even read, and nothing is written. The same holds for a tile without any probability."""
    case = with_top_k(make_case(2, 200, seed=3))
    case.logits[:, 64:128] -= 100.0
    case.logits[1, 128:] = -torch.inf
    case = case.to(device)
    check(case, pick(case.logits, [20, 5, 1, 0]))


def test_logits_after_adjustments_are_weighed_where_a_row_has_them(device: str) -> None:
    case = with_top_k(make_case(3, 130, seed=5)).to(device)
    adjusted = case.logits.roll(7, 1) - 1.0
    raw = case.logits.clone()
    case.logits[1] = 1e30
    partly = adjusted.clone()
    partly[[0, 2]] = torch.nan
    scratch = weighed(case, pick(adjusted, [60, 30, 9, 2]), partly)
    case.logits = torch.where(torch.arange(3, device=device)[:, None] == 1, adjusted, raw)
    again = weighed(case, pick(adjusted, [60, 30, 9, 2]))
    for found, expected in ((scratch.ahead, again.ahead), (scratch.counts, again.counts)):
        assert torch.equal(found.nan_to_num(-1.0), expected.nan_to_num(-1.0))


def test_only_what_truncation_needs_is_written(device: str) -> None:
    """Rows that are done, rows with only min-p, rows with only top-p, rows with top-k, and padding."""
    case = make_case(6, 130, seed=6)
    rows = case.rows.long()
    case.ints[rows[[0, 3]], TOP_K] = 4
    case.floats[rows[[0, 2]], TOP_P] = 0.5
    case.floats[rows[1], MIN_P] = 0.1
    case.ints[rows[4], TOP_K] = 130
    case.rows[5], case.positions[5] = 0, 0
    case = case.to(device)
    candidates = pick(case.logits, [129, 128, 2, 1])
    candidates[[0, 5], 0] = -1
    scratch = weighed(case, candidates)
    none = [0, 1, 4, 5]
    assert scratch.ahead[none].isnan().all() and scratch.counts[none].isnan().all()
    assert not scratch.ahead[2:4, :, 0].isnan().any() and scratch.counts[2].isnan().all()
    assert scratch.counts[3].nansum(0).tolist() == [129.0, 128.0, 2.0, 1.0]
