"""Steps of rows whose drafts are accepted with a given probability, to compare numbers of drafts without a device."""

import random
from collections import Counter

from tandem.engine_core.graph_sizes import DRAFT_SIZES, MAX_VERIFY_POSITIONS
from tandem.engine_core.scheduler.draft_costs import DraftCosts
from tandem.engine_core.scheduler.draft_policy import DraftPolicy
from tandem.engine_core.sequence import Sequence
from tests.support.scheduling import sequence

ROWS = (1, 8, 32, 64, 128, 256)
PLAIN = dict(zip(ROWS, (4.0, 4.1, 4.5, 5.2, 6.8, 10.9), strict=True))
"""Milliseconds of a step of an 8B model on an H200, about."""


def table(pass_ms: float) -> dict[tuple[int, int], tuple[float, float]]:
    """Costs that grow with the positions of a step; long contexts cost a plain step more, but not each draft."""
    found = {}
    for rows in ROWS:
        for size in (0, *DRAFT_SIZES):
            positions = rows * (1 + size)
            verify = PLAIN[rows] * (1 + 0.05 * (size > 0)) + max(0.0, positions - 200) * 0.021 * (size > 0)
            short = verify + size * (pass_ms + rows * 0.003)
            found[rows, size] = short, short + rows * 0.04
    return found


def rows_of(count: int, context: int = 400) -> list[Sequence]:
    found = [sequence(number) for number in range(count)]
    for seq in found:
        seq.drafts.max_drafts, seq.num_scheduled_tokens, seq.drafts.model_len = 7, context, context
    return found


class Simulation:
    """Steps of rows whose drafts are accepted with given probabilities, one step behind as in a pipeline."""

    def __init__(self, policy: DraftPolicy, rows: int, probability: float, seed: int = 0) -> None:
        self.policy, self.rows, self.probability = policy, rows, probability
        self.rng = random.Random(seed)
        self.sequences = rows_of(rows)
        self.pending: list[Counter[tuple[int, int]]] = []

    def run(self, steps: int, fixed: int | None = None) -> float:
        """Return the tokens per millisecond."""
        tokens, milliseconds = 0, 0.0
        for _ in range(steps):
            drafts = self.policy.choose(self.sequences) if fixed is None else fixed
            accepted = [self._accepted(drafts) for _ in range(self.rows)]
            tokens += self.rows + sum(accepted)
            milliseconds += self.policy.costs.milliseconds(self.rows, drafts, 400)
            if drafts and fixed is None:
                self.pending.append(Counter([(drafts, count) for count in accepted]))
            while len(self.pending) > 1 or (self.pending and not drafts):
                self.policy.observe(self.pending.pop(0))
        return tokens / milliseconds

    def _accepted(self, drafts: int) -> int:
        return next((index for index in range(drafts) if self.rng.random() >= self.probability), drafts)


def policy_of(pass_ms: float, has_model: bool = True, span_ms: float = 0.0) -> DraftPolicy:
    costs = DraftCosts(table(pass_ms), (400, 4000), 0.004 * has_model, span_ms)
    return DraftPolicy(DRAFT_SIZES, None, ROWS, has_model=has_model, costs=costs)


def best_fixed(policy: DraftPolicy, rows: int, probability: float) -> tuple[int, float]:
    """Return the best fixed number of drafts, and the tokens per millisecond that are expected with it."""
    rates = {}
    for size in (0, *DRAFT_SIZES):
        if rows * (1 + size) <= MAX_VERIFY_POSITIONS:
            tokens = sum(probability**index for index in range(size + 1))
            rates[size] = rows * tokens / policy.costs.milliseconds(rows, size, 400)
    best = max(rates, key=lambda size: rates[size])
    return best, rates[best]
