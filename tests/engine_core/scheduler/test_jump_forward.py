"""Forced tokens that are appended at once: the effect is that of each by itself."""

from collections import Counter
from collections.abc import Sequence as Items
from random import Random

import pytest

from tandem.engine_core.scheduler.commit import SchedulerUpdates, jump_forward
from tandem.engine_core.sequence import Sequence
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished
from tandem.protocol.params import SamplingParams
from tests.fakes.constraint import FakeConstraint
from tests.fakes.model import END
from tests.support.effort import EFFORT
from tests.support.refusals import numbers_in
from tests.support.scheduling import submitted

PROMPT = [10, 11, 12]


class ForcingConstraint(FakeConstraint):
    """Constraint that forces given tokens, and is complete after them or rejects one of them."""

    def __init__(self, forced: Items[int], completes: bool = False, rejects: int = -1) -> None:
        super().__init__("forcing")
        self.queue = list(forced)
        self.completes = completes
        self.rejects = rejects
        """Index of the token that it rejects; -1 for none."""
        self.runs: list[list[int]] = []
        """Arguments of `accept_forced`."""

    @property
    def is_complete(self) -> bool:
        return self.completes and not self.queue

    def accept(self, token: int) -> bool:
        if self.taken == self.rejects:
            self.problem_text = "too complex"
            return False
        assert self.queue.pop(0) == token
        self.taken += 1
        return True

    def accept_forced(self, tokens: Items[int]) -> bool:
        self.runs.append(list(tokens))
        return super().accept_forced(tokens)


def sequence(
    constraint: ForcingConstraint, max_tokens: int = 20, min_tokens: int = 0, generated: int = 0, inflight: int = 0
) -> Sequence:
    """Build a running sequence; inflight: samples in flight."""
    params = SamplingParams(max_tokens, min_tokens=min_tokens)
    seq = submitted(1, [*PROMPT, *[20] * generated], params, frozenset({END}))
    seq.prompt_len, seq.total_len = len(PROMPT), len(PROMPT) + max_tokens
    seq.constraint, seq.compiling, seq.in_steady_decode = constraint, False, True
    seq.num_scheduled_tokens, seq.num_inflight_samples = len(seq.tokens) + inflight - 1, inflight
    return seq


def one_by_one(
    constraint: ForcingConstraint, generated: int, min_tokens: int, max_tokens: int
) -> tuple[list[int], Finished | None]:
    """Return the forced tokens that a sequence gets, and its outcome."""
    taken: list[int] = []
    for token in constraint.fast_forward_tokens():
        if token == END and generated + len(taken) < min_tokens:
            break  # It may not be sampled yet, and is not forced either.
        assert constraint.accept(token)
        taken.append(token)
        if token == END and generated + len(taken) > min_tokens:
            return taken, Finished(1, FinishReason.STOP, END)
        if constraint.is_complete:
            return taken, Finished(1, FinishReason.STOP, END if token == END else None)
        if generated + len(taken) == max_tokens:
            return taken, Finished(1, FinishReason.LENGTH)
    return taken, None


def test_a_run_has_the_effect_of_each_token_by_itself() -> None:
    """With end ids in it, before and after min_tokens, up to the limit, and with a grammar that is complete then."""
    random, seen = Random(7), Counter[str]()
    for _ in range(3000 * EFFORT):
        forced = [random.randrange(2, 9) for _ in range(random.randrange(9))]
        if random.random() < 0.4:
            forced.insert(random.randrange(len(forced) + 1), END)
        max_tokens, completes = random.randrange(2, 14), random.random() < 0.3
        generated, inflight = random.randrange(min(4, max_tokens)), random.randrange(2)
        min_tokens, least = random.choice([0, 0, random.randrange(max_tokens + 1)]), random.randrange(1, 4)
        constraint, alone = ForcingConstraint(forced, completes), ForcingConstraint(forced, completes)
        seq = sequence(constraint, max_tokens, min_tokens, generated, inflight)
        before, scheduled, updates = list(seq.tokens), seq.num_scheduled_tokens, SchedulerUpdates()
        outcome = jump_forward(seq, updates, least)
        if len(forced) - inflight < least:
            taken, expected = [], None
        else:
            taken, expected = one_by_one(alone, generated, min_tokens, max_tokens)
            seen[f"{expected and expected.reason} {END in forced}"] += bool(taken)
            seen["bulk"] += len(constraint.runs)
        assert outcome == expected and list(seq.tokens) == before + taken
        assert constraint.queue == alone.queue and constraint.taken == alone.taken
        ids = [request_id for delta in updates.deltas.values() for request_id in delta.request_ids]
        tokens = [token for delta in updates.deltas.values() for token in delta.tokens]
        assert (ids, tokens) == ([1] * len(taken), taken)
        if taken:
            assert (seq.in_steady_decode, seq.num_inflight_samples) == (False, 0)
            assert (seq.device.upload_end, seq.device.uploaded_len) == (len(seq.tokens), scheduled)
        else:
            assert (seq.in_steady_decode, seq.num_inflight_samples) == (True, inflight)
    kinds = [f"{end} {has_end}" for end in (None, FinishReason.STOP, FinishReason.LENGTH) for has_end in (True, False)]
    assert all(seen[kind] > 20 for kind in [*kinds, "bulk"]), seen


def test_a_run_without_end_ids_is_given_to_the_constraint_at_once() -> None:
    """No more of it than the sequence may have."""
    constraint = ForcingConstraint([4, 5, 6, 7, 8])
    seq = sequence(constraint, max_tokens=4, generated=1)
    assert jump_forward(seq, SchedulerUpdates(), 1) == Finished(1, FinishReason.LENGTH)
    assert constraint.runs == [[4, 5, 6]] and constraint.queue == [7, 8]


@pytest.mark.parametrize(("max_tokens", "is_complete"), [(3, True), (2, False), (9, True)])
def test_a_grammar_that_completes_at_the_limit_or_before_is_a_stop(max_tokens: int, is_complete: bool) -> None:
    seq = sequence(ForcingConstraint([4, 5, 6], completes=True), max_tokens)
    reason = FinishReason.STOP if is_complete else FinishReason.LENGTH
    assert jump_forward(seq, SchedulerUpdates(), 1) == Finished(1, reason)
    assert seq.generated == min(3, max_tokens)


@pytest.mark.parametrize("rejects", [0, 1, 2])
def test_nothing_is_appended_of_a_run_that_the_grammar_rejects(rejects: int) -> None:
    seq, updates = sequence(ForcingConstraint([4, 5, 6], rejects=rejects), generated=2), SchedulerUpdates()
    outcome = jump_forward(seq, updates, 1)
    message = "the grammar cannot be followed any further after 2 tokens: too complex"
    assert outcome == Failure(1, ErrorCode.GRAMMAR_FAILED, message)
    assert list(seq.tokens) == [*PROMPT, 20, 20] and updates.num_tokens == 0 and seq.in_steady_decode


def test_of_a_run_with_an_end_the_tokens_before_the_rejected_one_are_appended() -> None:
    seq, updates = sequence(ForcingConstraint([4, 5, END], rejects=1)), SchedulerUpdates()
    outcome = jump_forward(seq, updates, 1)
    assert isinstance(outcome, Failure) and numbers_in(outcome.message) == [1]
    assert list(seq.tokens) == [*PROMPT, 4] and updates.deltas[b"c"].tokens == [4]


def test_a_rejected_token_beyond_the_limit_does_not_matter() -> None:
    seq = sequence(ForcingConstraint([4, 5, 6], rejects=2), max_tokens=2)
    assert jump_forward(seq, SchedulerUpdates(), 1) == Finished(1, FinishReason.LENGTH)
