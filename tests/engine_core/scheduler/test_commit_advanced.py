"""Rows whose constraint has accepted the step's token already: they are committed like all others."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from tandem.engine_core.contracts import NO_TOKEN, StepResult
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.scheduler.admission import RowGate
from tandem.engine_core.scheduler.commit import SchedulerUpdates, masked_tokens
from tandem.engine_core.scheduler.planner import SchedulerLimits
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.sequence import Sequence
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished
from tandem.protocol.params import SamplingParams
from tests.fakes.constraint import FakeConstraint, own
from tests.fakes.model import END, VOCAB
from tests.support.effort import EFFORT
from tests.support.kv_pool import kv_memory
from tests.support.scheduling import launched, submitted

GRAMMARS = (None, "parity", "parity", "runs", "runs 2", "stops 3", "breaks 4", "dies 5")


def new() -> Scheduler:
    """Build a scheduler without a cache, whose order depends on which of a step's sequences is released first."""
    return Scheduler(RowGate(6), kv_memory(60, cache=False), SchedulerLimits(12, 12, 50))


def result_of(plan: StepPlan, tokens: dict[int, int]) -> StepResult:
    """Return the result of a step; tokens: by sequence."""
    counts = [int(row.samples) for row in plan.rows]
    return StepResult(counts, [tokens[row.seq_id] for row in plan.rows if row.samples])


def work(plan: StepPlan | None) -> list[tuple[Any, ...]] | None:
    """Return what a step computes, whichever rows and pages it uses."""
    if plan is None:
        return None
    return [
        (row.seq_id, row.start, row.length, row.samples, row.tokens, len(row.new_pages), row.skipped)
        for row in plan.rows
    ]


def facts(seq: Sequence) -> tuple[Any, ...]:
    """Return all that a commit may change in a sequence; the constraint of one that has ended does not matter."""
    rule = None if seq.constraint is None or seq.outcome is not None else vars(own(seq.constraint))
    counters = seq.inflight, seq.num_inflight_samples, seq.num_scheduled_tokens, seq.in_steady_decode
    return seq.id, list(seq.tokens), rule, counters, seq.outcome, seq.num_pages, seq.preemptions


def state(scheduler: Scheduler) -> tuple[Any, ...]:
    assert scheduler.audit() == []
    return (
        sorted(facts(seq) for seq in scheduler.held),
        list(scheduler.running),
        scheduler._running.unsteady,
        [seq.id for seq in scheduler.waiting],
        scheduler.num_open,
        scheduler.memory.usage.in_use,
    )


def sent(updates: SchedulerUpdates) -> tuple[Any, ...]:
    deltas = {client: (delta.request_ids, delta.tokens) for client, delta in updates.deltas.items() if delta.tokens}
    ended, first = [facts(seq) for seq in updates.ended], [seq.id for seq in updates.first_tokens]
    return updates.started, deltas, ended, updates.num_zombies, first


class Twins:
    """Two schedulers with the same requests: one whose rows may be advanced before a commit, and one without."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.helped, self.plain = new(), new()
        self.both = (self.helped, self.plain)
        self.num_requests = self.num_steps = 0
        self.flights: list[tuple[StepPlan, StepPlan]] = []
        self.seen: Counter[str] = Counter()

    def add(self) -> None:
        random, number = self.random, self.num_requests
        grammar, client = random.choice(GRAMMARS), random.choice([b"a", b"b"])
        limit, prompt = random.randrange(1, 16), [random.randrange(2, VOCAB) for _ in range(random.randrange(1, 20))]
        params = SamplingParams(limit, min_tokens=random.choice([0, 0, min(3, limit)]))
        ends = random.choice([frozenset({END}), frozenset()])
        for scheduler in self.both:
            seq = submitted(number, list(prompt), params, ends, client)
            seq.constraint = None if grammar is None else FakeConstraint(grammar)
            scheduler.add(seq)
        self.num_requests += 1

    def launch(self) -> bool:
        for scheduler in self.both:
            while scheduler.admit_waiting():
                pass
        self.num_steps += 1
        plans = [scheduler.plan_step(self.num_steps) for scheduler in self.both]
        assert work(plans[0]) == work(plans[1])
        if plans[0] is None or plans[1] is None:
            return False
        for scheduler, plan in zip(self.both, plans, strict=True):
            assert plan is not None
            scheduler.on_launch(plan)
        self.flights.append((plans[0], plans[1]))
        return True

    def token(self, constraint: FakeConstraint | None) -> int:
        """Return a token that may be sampled, or one that is rejected."""
        tokens = [token for token in range(1, VOCAB) if constraint is None or constraint.allows(token)]
        if self.random.random() < 0.02 or not tokens:
            return 0 if constraint is not None else 3
        return self.random.choice([END] * (END in tokens) + tokens)

    def advance(self, seq: Sequence, token: int) -> bool:
        """Let a constraint accept its token if nothing is left to do for it then, like an advancer."""
        ahead = FakeConstraint("")
        assert seq.constraint is not None
        vars(ahead).update(vars(own(seq.constraint)), queue=list(own(seq.constraint).queue))
        goes_on = ahead.accept(token) and not ahead.is_complete
        # The step in flight, if any, samples the one forced token.
        if not goes_on or len(ahead.fast_forward_tokens()) > seq.num_inflight_samples - 1 or self.random.random() < 0.2:
            return False
        return seq.constraint.accept(token)

    def commit(self) -> None:
        plan, twin_plan = self.flights.pop(0)
        sequences = {seq.id: seq for seq in self.helped.held}
        masked = {row for row, _ in self.helped.masks(plan)}
        constraints = {
            seq.id: own(seq.constraint) for seq in sequences.values() if seq.constraint and seq.row in masked
        }
        tokens = {row.seq_id: self.token(constraints.get(row.seq_id)) for row in plan.sampled_rows}
        advanced = {seq_id for seq_id in constraints if self.advance(sequences[seq_id], tokens[seq_id])}
        if self.random.random() < 0.1 and (others := [seq_id for seq_id in tokens if seq_id not in advanced]):
            tokens[self.random.choice(others)] = NO_TOKEN
            self.seen["advanced beside a failed row"] += bool(advanced)
        for seq in [seq for seq in self.helped.running.values() if self.random.random() < 0.04]:
            for scheduler in self.both:
                scheduler.abort(seq.client, seq.request_id)
            self.seen["advanced zombie"] += seq.id in advanced
        rows = {sequences[seq_id].row for seq_id in advanced}
        updates = sent(self.helped.commit(plan, result_of(plan, tokens), rows))
        assert updates == sent(self.plain.commit(twin_plan, result_of(twin_plan, tokens)))
        self.seen["advanced"] += len(advanced)
        self.seen["advanced beside others"] += 0 < len(advanced) < len(plan.rows)
        self.seen["advanced beside a chunk"] += bool(advanced and plan.chunk_rows)
        for seq_id in advanced:
            outcome = sequences[seq_id].outcome
            if isinstance(outcome, Finished):
                self.seen[f"advanced and ended by {outcome.reason}"] += 1

    def preempt(self) -> None:
        if self.helped.running and self.random.random() < 0.05:
            seq_id = self.random.choice(list(self.helped.running))
            for scheduler in self.both:
                scheduler.preempt(scheduler.running[seq_id])


def test_advanced_rows_are_committed_as_without_an_advancer() -> None:
    """Random requests with two steps in flight; some are preempted or end between acceptance and commit."""
    seen: Counter[str] = Counter()
    for seed in range(40 * EFFORT):
        twins = Twins(Random(seed))
        for _ in range(50):
            if twins.random.random() < 0.5:
                twins.add()
            is_launched = twins.launch()
            if twins.flights and (len(twins.flights) == 2 or not is_launched):
                twins.commit()
            twins.preempt()
            assert state(twins.helped) == state(twins.plain), seed
        seen += twins.seen
    kinds = ("zombie", "beside a failed row", "beside others", "beside a chunk", "and ended by abort")
    kinds += ("and ended by stop", "and ended by length")
    assert all(seen[f"advanced {kind}"] > 3 for kind in kinds), seen


def began(grammar: str, max_tokens: int = 10, min_tokens: int = 0) -> tuple[Scheduler, Sequence]:
    """Return a scheduler that runs one sequence with a grammar."""
    scheduler = new()
    seq = submitted(1, [10, 11, 12], SamplingParams(max_tokens, min_tokens=min_tokens), frozenset({END}))
    seq.constraint = FakeConstraint(grammar)
    scheduler.add(seq)
    scheduler.admit_waiting()
    return scheduler, seq


def commit_advanced(scheduler: Scheduler, seq: Sequence, plan: StepPlan, token: int) -> SchedulerUpdates:
    """Commit a token that the constraint has accepted before."""
    assert seq.constraint is not None and seq.constraint.accept(token)
    return scheduler.commit(plan, result_of(plan, {seq.id: token}), {seq.row})


def test_an_advanced_constraint_gets_no_token_twice() -> None:
    scheduler, seq = began("parity")
    for step, token in enumerate((20, 21, 22, 23), start=1):
        assert commit_advanced(scheduler, seq, launched(scheduler, step), token).deltas[b"c"].tokens == [token]
    assert own(seq.constraint).taken == 4 and own(seq.constraint).problem == ""  # type: ignore[arg-type]


@pytest.mark.parametrize("is_steady", [True, False])
def test_an_advanced_row_is_asked_nothing_more(is_steady: bool) -> None:
    """Neither for forced tokens nor whether its grammar is complete: the advancer has looked at both."""

    class Silent(FakeConstraint):
        @property
        def is_complete(self) -> bool:
            raise AssertionError("asked whether it is complete")

        def fast_forward_tokens(self) -> list[int]:
            raise AssertionError("asked for forced tokens")

        def accept(self, token: int) -> bool:
            raise AssertionError("given a token")

    scheduler, seq = began("parity")
    plan = launched(scheduler, 1)
    seq.constraint, seq.in_steady_decode = Silent("parity"), is_steady
    updates = scheduler.commit(plan, result_of(plan, {seq.id: 20}), {seq.row})
    assert updates.deltas[b"c"].tokens == [20] and list(seq.tokens) == [10, 11, 12, 20]
    assert (seq.inflight, seq.num_inflight_samples, seq.outcome) == (0, 0, None)
    assert (seq.id in scheduler._running.unsteady) is not is_steady, "the planner looks at it again"


def test_an_advanced_end_id_and_the_last_token_end_a_sequence() -> None:
    scheduler, seq = began("parity", min_tokens=1)
    plans = [launched(scheduler, 1), launched(scheduler, 2)]
    assert commit_advanced(scheduler, seq, plans[0], END).ended == [], "min_tokens is not reached"
    own(seq.constraint).taken = 2  # type: ignore[arg-type]
    assert commit_advanced(scheduler, seq, plans[1], END).ended == [seq]
    assert seq.outcome == Finished(1, FinishReason.STOP, END)
    scheduler, seq = began("parity", max_tokens=2)
    plans = [launched(scheduler, 1), launched(scheduler, 2)]
    assert commit_advanced(scheduler, seq, plans[0], 20).ended == []
    assert commit_advanced(scheduler, seq, plans[1], 21).ended == [seq]
    assert seq.outcome == Finished(1, FinishReason.LENGTH) and list(scheduler.held) == []


def test_an_advanced_zombie_gets_no_token_and_is_released() -> None:
    scheduler, seq = began("parity")
    plans = [launched(scheduler, 1), launched(scheduler, 2)]
    scheduler.abort(b"c", 1)
    updates = commit_advanced(scheduler, seq, plans[0], 20)
    assert (updates.num_zombies, updates.deltas, list(scheduler.held)) == (1, {}, [seq])
    updates = scheduler.commit(plans[1], result_of(plans[1], {seq.id: 21}))
    assert (updates.num_zombies, updates.num_tokens, list(scheduler.held)) == (1, 0, [])


def test_a_failed_row_leaves_advanced_ones_unharmed() -> None:
    scheduler, seq = began("parity")
    other = submitted(2, [13, 14], SamplingParams(9))
    scheduler.add(other)
    scheduler.admit_waiting()
    plan = launched(scheduler, 1)
    assert seq.constraint is not None and seq.constraint.accept(20)
    updates = scheduler.commit(plan, result_of(plan, {seq.id: 20, other.id: NO_TOKEN}), {seq.row})
    assert updates.ended == [other] and updates.num_tokens == 1
    assert isinstance(other.outcome, Failure) and other.outcome.code is ErrorCode.MODEL_FAILED
    assert list(seq.tokens) == [10, 11, 12, 20] and seq.outcome is None
    assert own(seq.constraint).taken == 1


class TestMaskedTokens:
    """Rows 1 and 3 of the step have a mask; another computes a chunk."""

    def plan(self) -> tuple[Scheduler, StepPlan, list[Sequence]]:
        scheduler = new()
        sequences = [submitted(number, [10 * number] * 2, SamplingParams(9)) for number in range(1, 5)]
        sequences.append(submitted(5, [9] * 30, SamplingParams(9)))
        for seq in sequences:
            seq.constraint = FakeConstraint("parity") if seq.id % 2 else None
            scheduler.add(seq)
        scheduler.admit_waiting()
        return scheduler, launched(scheduler, 1), sequences

    def test_each_mask_has_the_token_of_its_row(self) -> None:
        scheduler, plan, (first, _, third, _, chunk) = self.plan()
        assert [row.seq_id for row in plan.chunk_rows] == [chunk.id]
        result = result_of(plan, {row.seq_id: 20 + row.seq_id for row in plan.sampled_rows})
        masks = scheduler.masks(plan)
        assert [row for row, _ in masks] == [first.row, third.row]
        assert masked_tokens(plan, result, masks) == [21, 23]
        scheduler.abort(b"c", first.request_id)
        assert masked_tokens(plan, result, scheduler.masks(plan)) == [23]
        assert masked_tokens(plan, result, []) == []

    def test_masks_for_all_rows(self) -> None:
        scheduler, seq = began("parity")
        plan = launched(scheduler, 1)
        assert masked_tokens(plan, result_of(plan, {seq.id: 20}), scheduler.masks(plan)) == [20]

    @pytest.mark.parametrize("failed", [0, 1, 2, 3])
    def test_a_failed_row_has_none(self, failed: int) -> None:
        scheduler, plan, sequences = self.plan()
        tokens = {row.seq_id: 20 for row in plan.sampled_rows} | {sequences[failed].id: NO_TOKEN}
        masks = scheduler.masks(plan)
        assert masked_tokens(plan, result_of(plan, tokens), masks) == [
            NO_TOKEN if row == sequences[failed].row else 20 for row, _ in masks
        ]

    @pytest.mark.parametrize("counts", [[2, 1, 1, 1, 0], [0, 1, 1, 1, 0], [2, 0, 1, 1, 0]])
    def test_runs_of_other_lengths_leave_none(self, counts: list[int]) -> None:
        scheduler, plan, _ = self.plan()
        assert masked_tokens(plan, StepResult(counts, [20] * sum(counts)), scheduler.masks(plan)) == []
