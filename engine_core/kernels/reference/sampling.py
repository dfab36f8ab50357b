"""Sampling in plain torch: the oracle of the kernels, and the CPU implementation.

No function here modifies its arguments.
"""

from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.reference.philox import gumbel_noise

SEGMENT = 1024
"""Tokens per segment. A draw needs noise for the segments and for the tokens of one. Equal numbers of both would
minimize it, but fewer tokens do not make a GPU faster. Changing this changes the sampled tokens."""
CANDIDATES = 4
"""Candidates drawn from all tokens before resampling from fewer. A GPU draws them concurrently. Changing this changes
the sampled tokens."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Parameters of each row's draw, [S] each."""

    temperature: Tensor
    """float32; 0 means greedy."""
    seed: Tensor
    """int64, non-negative."""
    choice: Tensor
    """int64, index of the choice (`n`) within its request."""
    position: Tensor
    """int64, position of the sampled token in its sequence."""

    def of(self, rows: Tensor) -> "Draw":
        """Return the parameters of a subset of the rows."""
        return Draw(self.temperature[rows], self.seed[rows], self.choice[rows], self.position[rows])


@dataclass(frozen=True, slots=True)
class Truncation:
    """Arguments of `truncate`, [S] each; the neutral values are 0, 1 and 0."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def of(self, rows: Tensor) -> "Truncation":
        """Return the arguments of a subset of the rows."""
        return Truncation(self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class Penalties:
    """Arguments of `penalize`.

    history: [S, L]; the others: [S]. The neutral values are 1 (repetition), 0 (presence) and 0 (frequency).
    """

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    history: Tensor
    prompt_len: Tensor
    total_len: Tensor


@dataclass(frozen=True, slots=True)
class Bias:
    """Arguments of `add_bias`.

    ids: [S, K] int64, -1 for none; values: [S, K] float32.
    """

    ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Gathered parameters of the S sampled rows.

    A group that no row needs is None.
    """

    draw: Draw | None = None
    """None if every row is greedy."""
    truncation: Truncation | None = None
    penalties: Penalties | None = None
    bias: Bias | None = None
    suppressed: Tensor | None = None
    """[S, E] int64, currently suppressed ids; -1 for none."""


def sample(logits: Tensor, rows: SamplingRows, allowed: Tensor | None = None, segment: int = SEGMENT) -> Tensor:
    """Sample one token per row, computed in float32. Returns [S] int64.

    logits: [S, V], not modified; allowed: masks as in `apply_bitmask`, or None. In order: bias, penalties, suppression,
    mask; then a greedy row takes the argmax, the lowest id on ties, and any other row divides by its temperature,
    truncates and draws from the softmax (`draw_token`). The token depends only on the row's logits, parameters, seed,
    choice and position. A row with NaN or +inf, or with -inf only, has no softmax and yields -1. A row with no token
    left after suppression and mask yields id 0. segment: as in `draw_token`.
    """
    largest = logits.amax(-1)
    logits = adjust_logits(logits, rows, allowed)
    tokens = logits.argmax(-1)
    if rows.draw is not None:
        scores = logits - logits.gather(1, tokens.unsqueeze(1))
        drawing = ((rows.draw.temperature != 0) & largest.isfinite() & scores.isfinite().any(1)).nonzero().squeeze(1)
        # Subtract the maximum before the division, so that no temperature is small enough to overflow.
        scores = scores[drawing] / rows.draw.temperature[drawing].unsqueeze(1)
        truncation = None if rows.truncation is None else rows.truncation.of(drawing)
        tokens[drawing] = _draw(scores, rows.draw.of(drawing), truncation, segment)
    return torch.where(largest.isfinite(), tokens, -1)


def draw_token(scores: Tensor, draw: Draw, number: int, segment: int = SEGMENT) -> Tensor:
    """Draw a token of each row from the softmax of scores.

    First a segment of the vocabulary is drawn by its mass, then one of its tokens. Each draw uses the Gumbel-max trick:
    the argmax of log-probability plus Gumbel noise (Gumbel, 1954; Maddison et al., 2014). So a small change of the
    logits rarely changes the token, and most tokens need no noise.

    scores: [S, V]; number: index of the draw among those for one position, which uses the noise streams 2 * number for
    segments and 2 * number + 1 for tokens (see `philox`); segment: tokens per segment, a multiple of 4. Returns [S].
    """
    key = (draw.seed, draw.choice, draw.position)
    if scores.shape[1] <= segment:  # Do not draw the only segment, nor noise for its padding.
        return (scores + gumbel_noise(*key, scores.shape[1], 2 * number + 1)).argmax(-1)
    parts = functional.pad(scores, (0, -scores.shape[1] % segment), value=-torch.inf).unflatten(1, (-1, segment))
    masses = parts.logsumexp(-1)
    chosen = (masses + gumbel_noise(*key, masses.shape[1], 2 * number)).argmax(-1)
    part = parts[torch.arange(len(parts), device=parts.device), chosen]
    first = chosen * segment
    tokens: Tensor = first + (part + gumbel_noise(*key, segment, 2 * number + 1, first)).argmax(-1)
    return tokens


def _draw(scores: Tensor, draw: Draw, truncation: Truncation | None, segment: int) -> Tensor:
    """Draw until truncation keeps the token.

    This is rejection sampling from the truncated distribution. The first CANDIDATES draws are from all tokens. Later
    ones are from the tokens that rank ahead of all rejected ones and that top-k and min-p keep.
    """
    if truncation is None:
        return draw_token(scores, draw, 0, segment)
    kept = truncate(scores, truncation.top_k, truncation.top_p, truncation.min_p) > -torch.inf
    tokens = torch.zeros_like(draw.seed)
    # Rows without a token yet, the scores to draw from, and the highest-ranked token drawn so far.
    rows = torch.arange(len(scores), device=scores.device)
    open_, foremost = scores, torch.full_like(tokens, -1)
    for number in count():
        drawn = draw_token(open_, draw.of(rows), number, segment)
        tokens[rows] = drawn
        left = ~kept[rows, drawn]
        rows, open_, foremost, drawn = rows[left], open_[left], foremost[left], drawn[left]
        if not len(rows):
            break
        scored = scores[rows]
        leads = (foremost < 0) | is_ahead(scored, foremost.clamp(min=0)).gather(1, drawn.unsqueeze(1)).squeeze(1)
        foremost = torch.where(leads, drawn, foremost)
        if number >= CANDIDATES - 1:
            t = truncation.of(rows)
            open_ = truncate(scored, t.top_k, torch.ones_like(t.top_p), t.min_p)
            open_ = open_.masked_fill(~is_ahead(scored, foremost), -torch.inf)
    return tokens


def is_ahead(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return a mask of the tokens that rank ahead of each row's own.

    scores: [S, V]; tokens: [S] ids. Returns [S, V].
    """
    own = scores.gather(1, tokens.unsqueeze(1))
    lower = torch.arange(scores.shape[1], device=scores.device) < tokens.unsqueeze(1)
    return (scores > own) | ((scores == own) & lower)


def adjust_logits(logits: Tensor, rows: SamplingRows, allowed: Tensor | None) -> Tensor:
    """Apply bias, penalties, suppression and mask, in this order.

    Returns [S, V] float32.
    """
    logits = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if rows.bias is not None:
        logits = add_bias(logits, rows.bias.ids, rows.bias.values)
    if rows.penalties is not None:
        p = rows.penalties
        logits = penalize(logits, p.history, p.prompt_len, p.total_len, p.repetition, p.presence, p.frequency)
    if rows.suppressed is not None:
        logits = suppress(logits, rows.suppressed)
    if allowed is not None:
        logits = apply_bitmask(logits, allowed)
    return logits


def process_logits(logits: Tensor, rows: SamplingRows, allowed: Tensor | None) -> Tensor:
    """Return logits of the distributions that `sample` draws from.

    In order: bias, penalties, suppression and mask; then, unless a row is greedy, division by its temperature and
    truncation. They are relative to the maximum of a row that draws. The tokens that it cannot draw have -inf.

    logits: [S, V], not modified; allowed: as in `sample`. Returns [S, V] float32.
    """
    logits = adjust_logits(logits, rows, allowed)
    if rows.draw is None:
        return logits
    draws = (rows.draw.temperature != 0).unsqueeze(1)
    # Subtract the maximum before the division, so that no temperature is small enough to overflow.
    scores = (logits - logits.amax(-1, keepdim=True)) / torch.where(draws, rows.draw.temperature.unsqueeze(1), 1.0)
    if (t := rows.truncation) is not None:
        scores = truncate(scores, t.top_k, t.top_p, t.min_p)
    return torch.where(draws, scores, logits)


def logprob_records(logits: Tensor, chosen: Tensor, top: int) -> Tensor:
    """Return log-probabilities of each row's token and of its top tokens.

    They are the row's log-softmax, in float32, at one token and at its `top` largest logits.

    logits: [S, V], not modified, NaN counts as -inf; chosen: [S] integer ids, -1 for none; top: 0 to V. Returns [S, 1 +
    2 * top] int32: the bits of the chosen token's float32 log-probability, the bits of the top ones in descending
    order, and their ids. Ties are ordered by id. The log-probability is -inf for a token without probability, and for a
    missing id.
    """
    x = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    logprobs = x.log_softmax(-1).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ids = chosen.long().unsqueeze(1)
    own = logprobs.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    # Pack (logit, lower id) into integers: no two are equal, so the order is unique.
    bits = (x + 0.0).view(torch.int32)
    rank = torch.where(bits >= 0, bits, bits ^ 0x7FFF_FFFF).long()
    ids = torch.arange(x.shape[1], device=x.device)
    best = ((rank << 32) - ids).topk(top, dim=1).indices
    values = torch.cat([own, logprobs.gather(1, best)], dim=1)
    return torch.cat([values.view(torch.int32), best.int()], dim=1)


def add_bias(logits: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Add values to the logits of ids.

    logits: [S, V]; ids: [S, K] int64, -1 for none; values: [S, K] float32.
    """
    used = ids >= 0
    return logits.scatter_add(1, torch.where(used, ids, 0), torch.where(used, values, 0.0))


def suppress(logits: Tensor, ids: Tensor) -> Tensor:
    """Set the logits of ids to -inf.

    logits: [S, V]; ids: [S, E] int64, -1 for none.
    """
    used = ids >= 0
    limit = torch.where(used, -torch.inf, torch.inf).to(logits.dtype)
    return logits.scatter_reduce(1, torch.where(used, ids, 0), limit, "amin")


def apply_bitmask(logits: Tensor, allowed: Tensor) -> Tensor:
    """Set the logits of tokens with clear bits to -inf.

    allowed: [S, ceil(V / 32)] int32; token i is bit i % 32 of word i // 32.
    """
    bits = torch.arange(32, device=allowed.device, dtype=torch.int32)
    keep = (allowed.unsqueeze(-1) >> bits & 1).flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(keep == 0, -torch.inf)


def penalize(
    logits: Tensor,
    history: Tensor,
    prompt_len: Tensor,
    total_len: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Apply repetition, presence and frequency penalties.

    Repetition (Keskar et al., 2019) covers prompt and output: a positive logit is divided by it, a negative one
    multiplied. Presence and frequency (the OpenAI API) cover the output only: presence is subtracted once per distinct
    token, frequency once per occurrence. history: [S, L] token ids; the first total_len are the sequence's, and the
    first prompt_len its prompt; prompt_len, total_len: [S] integers; the penalties: [S] float32.
    """
    positions = torch.arange(history.shape[1], device=history.device)
    known = positions < total_len.unsqueeze(1)
    ids = torch.where(known, history, 0).long()
    output = known & (positions >= prompt_len.unsqueeze(1))
    zeros = torch.zeros_like(logits)
    held = zeros.scatter_add(1, ids, known.to(logits.dtype)) > 0
    counts = zeros.scatter_add(1, ids, output.to(logits.dtype))
    factor = repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(held, repeated, logits)
    return logits - counts * frequency.unsqueeze(1) - (counts > 0) * presence.unsqueeze(1)


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set tokens outside of top-k, top-p and min-p, applied in this order, to -inf.

    Tokens are ranked by logit, ties by lower id. Top-k keeps the first k (0: all). Top-p (Holtzman et al., 2020) keeps
    the smallest prefix with a cumulative probability, renormalized after top-k, of at least p. Min-p (Nguyen et al.,
    2024) keeps tokens at least min_p times as probable as the first. The first token is always kept.

    logits: [S, V] float32, divided by the temperature; top_k: [S] integer; top_p, min_p: [S] float32.
    """
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[1]).unsqueeze(1)
    keep = rank < limit
    probabilities = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    nucleus = top_p.unsqueeze(1)
    keep &= (before < nucleus) | (nucleus >= 1)
    keep &= ordered >= ordered[:, :1] + min_p.log().unsqueeze(1)
    keep |= rank == 0
    return logits.masked_fill(~torch.zeros_like(keep).scatter(1, ids, keep), -torch.inf)
