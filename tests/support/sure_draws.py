"""Draws by the oracle's rules, and whether rounding could have changed them."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.reference.philox import gumbel_noise
from tandem.engine_core.kernels.reference.sampling import CANDIDATES, SEGMENT, Draw, Truncation, truncate

NEAR_TOKEN = 3e-5
"""Sums of score and noise closer than this may change places: the kernel's noise is right to about 3e-6."""
NEAR_MASS = 5e-6
"""A cumulative probability this close to top-p may fall on either side."""
NEAR_BOUND = 1e-5
"""So may a score this close to the bound of min-p."""


@dataclass
class Sure:
    """One row's token, and the number of draws that it took."""

    token: int
    draws: int
    sure: bool
    """False if the token could be another after rounding."""


def sure_draw(
    scores: Tensor, draw: Draw, truncation: Truncation | None, segment: int = SEGMENT, near: float = NEAR_TOKEN
) -> Sure:
    """Draw the token of one row. scores: [V], 0 for its best token; draw, truncation: of that row alone."""
    order = scores.double().sort(descending=True, stable=True).indices
    place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    sets = [torch.ones_like(scores, dtype=torch.bool)] * 3
    if truncation is not None:
        sets = _sets(scores, truncation, place)
    kept, doubtful, open_ = sets
    sure, foremost = True, len(order)
    for number in range(1000):
        within = torch.ones_like(kept) if number < CANDIDATES else open_ & (place < foremost)
        token, clear = _draw_one(scores.masked_fill(~within, -torch.inf), draw, number, segment, near)
        sure &= clear and (truncation is None or not bool(doubtful[token]))
        if truncation is None or kept[token]:
            return Sure(token, number + 1, sure)
        foremost = min(foremost, int(place[token]))
    raise AssertionError("a thousand draws did not yield a token")


def _draw_one(scores: Tensor, draw: Draw, number: int, segment: int, near: float) -> tuple[int, bool]:
    key = (draw.seed, draw.choice, draw.position)
    parts = functional.pad(scores.double(), (0, -len(scores) % segment), value=-torch.inf).view(-1, segment)
    first, clear = _largest(parts.logsumexp(1) + gumbel_noise(*key, len(parts), 2 * number)[0], near)
    start = draw.seed * 0 + first * segment
    second, also = _largest(parts[first] + gumbel_noise(*key, segment, 2 * number + 1, start)[0], near)
    return first * segment + second, clear and also


def _largest(sums: Tensor, near: float) -> tuple[int, bool]:
    values = sums.topk(min(2, len(sums))).values
    return int(sums.argmax()), len(values) < 2 or bool(values[0] - values[1] > near)


def _sets(scores: Tensor, t: Truncation, place: Tensor) -> list[Tensor]:
    """The tokens that truncation keeps, those of which rounding may decide it, and those that top-k and min-p keep."""
    exact = scores.double().unsqueeze(0)
    kept = truncate(exact, t.top_k, t.top_p.double(), t.min_p.double())[0] > -torch.inf
    open_ = truncate(exact, t.top_k, torch.ones_like(t.top_p), t.min_p.double())[0] > -torch.inf
    limit = int(t.top_k) if t.top_k > 0 else len(scores)
    share = exact[0].masked_fill(place >= limit, -torch.inf).softmax(0)
    ordered = torch.zeros_like(share).scatter(0, place, share)
    before = (ordered.cumsum(0) - ordered)[place]
    doubtful = (exact[0] - t.min_p.double().log()).abs() < NEAR_BOUND
    if t.top_p < 1:
        doubtful |= ((before - t.top_p.double()).abs() < NEAR_MASS) & (place < limit)
    return [kept, doubtful & (place > 0), open_]
