"""From logits to tokens: pure functions over gathered rows. What a step does not need is None, known on the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine_core.kernels.reference.philox import gumbel_noise
from tandem.engine_core.kernels.reference.sampling import add_bias, apply_bitmask, penalize, suppress, truncate


@dataclass(frozen=True, slots=True)
class Draw:
    """How each row draws. All [S]."""

    temperature: Tensor
    """float32; 0 is greedy."""
    seed: Tensor
    """int64, not negative."""
    choice: Tensor
    """int64, index among the choices of one request."""
    position: Tensor
    """int64, the position that the sampled token takes in its sequence."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which tokens may be drawn, as in `truncate`. All [S]; neutral values are 0, 1 and 0."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """As in `penalize`. history: [S, L]; the others [S]; neutral penalties are 1, 0 and 0."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    history: Tensor
    prompt_len: Tensor
    total_len: Tensor


@dataclass(frozen=True, slots=True)
class Bias:
    """What is added to single logits, as in `add_bias`. ids: [S, K] int64, -1 for none; values: [S, K] float32."""

    ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The S rows of a step that are sampled from. A group is None when no row of the step needs it."""

    draw: Draw | None = None
    """None: every row is greedy."""
    truncation: Truncation | None = None
    penalties: Penalties | None = None
    bias: Bias | None = None
    suppressed: Tensor | None = None
    """[S, E] int64, ids that may not be sampled now; -1 for none."""


def sample(logits: Tensor, rows: SamplingRows, allowed: Tensor | None = None) -> Tensor:
    """One token a row, computed in float32. logits: [S, V], not modified; allowed: a mask as in `apply_bitmask`.

    In order: bias, penalties, suppression, mask; then a greedy row takes the largest logit, and another divides by its
    temperature, truncates and takes the largest sum of logit and Gumbel noise, which is a draw from the softmax
    (Gumbel, 1954; Maddison et al., 2014). Equal ones: the lowest id. The noise depends on the row's seed, choice and
    position only (see `philox`). NaN counts as -inf, and a row with nothing but -inf yields id 0. Returns [S] int64.
    """
    logits = adjust(logits, rows, allowed)
    best = logits.argmax(-1)
    if rows.draw is None:
        return best
    temperature = rows.draw.temperature
    greedy = temperature == 0
    # The largest logit becomes 0 before the division, so that no temperature is small enough to overflow.
    scores = logits - logits.gather(1, best.unsqueeze(1))
    scores = scores / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    if rows.truncation is not None:
        scores = truncate(scores, rows.truncation.top_k, rows.truncation.top_p, rows.truncation.min_p)
    noise = gumbel_noise(rows.draw.seed, rows.draw.choice, rows.draw.position, logits.shape[1])
    return torch.where(greedy, best, (scores + noise).argmax(-1))


def adjust(logits: Tensor, rows: SamplingRows, allowed: Tensor | None) -> Tensor:
    """The logits that `sample` chooses from: bias, penalties, suppression and mask applied. [S, V] float32."""
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
