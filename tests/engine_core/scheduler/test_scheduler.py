"""The scheduler by itself: examples, and a state machine that plays engine and device."""

from array import array
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_core.errors import RequestError
from engine_core.kv_cache.pages import PageAllocator
from engine_core.plan import StepPlan
from engine_core.scheduler.admission import PageGate, RowGate
from engine_core.scheduler.scheduler import Scheduler, SchedulerLimits
from engine_core.scheduler.sequence import Sequence
from protocol.errors import ErrorCode, FinishReason
from protocol.events import Failure, Finished
from protocol.params import SamplingParams
from tests.fakes.constraint import FakeConstraint, FakeVerifier

END = 1
CLIENTS = st.sampled_from([b"a", b"b"])


def new(rows: int = 4, pages: int = 40, step: int = 16, chunk: int = 16, waiting: int = 50) -> Scheduler:
    limits = SchedulerLimits(step, chunk, waiting)
    return Scheduler(RowGate(rows), PageGate(PageAllocator(pages), 4), limits, FakeVerifier())


def sequence(number: int, prompt: int = 5, max_tokens: int = 3, client: bytes = b"c", min_tokens: int = 0) -> Sequence:
    params = SamplingParams(max_tokens, min_tokens=min_tokens)
    return Sequence(number, client, number, array("i", range(10, 10 + prompt)), params, frozenset({END}))


def added(scheduler: Scheduler, *sequences: Sequence) -> None:
    for seq in sequences:
        scheduler.add(seq)
    scheduler.admit_waiting()


def launched(scheduler: Scheduler, step_id: int) -> StepPlan:
    plan = scheduler.plan_step(step_id)
    assert plan is not None
    scheduler.on_launch(plan)
    return plan


def test_the_rows_of_a_life() -> None:
    scheduler, seq = new(chunk=3), sequence(7, min_tokens=2)
    added(scheduler, seq)
    first, second = launched(scheduler, 1), launched(scheduler, 2)
    assert [(row.start, row.length, row.samples) for row in (*first.rows, *second.rows)] == [
        (0, 3, False),
        (3, 2, True),
    ]
    assert array("i", first.rows[0].tokens).tolist() == [10, 11, 12]
    assert array("i", second.rows[0].tokens).tolist() == [13, 14]
    assert (first.rows[0].new_pages, first.rows[0].first_page) == (tuple(seq.pages), 0)
    assert second.rows[0].new_pages == ()
    (admission,) = first.admitted
    assert (admission.seq_id, admission.row, admission.prompt_len, admission.end_ids) == (7, seq.row, 5, (END,))
    assert second.admitted == ()
    scheduler.commit(first, [-1])
    third = launched(scheduler, 3)
    assert [(row.start, row.length, row.samples, row.tokens) for row in third.rows] == [(5, 1, True, b"")]
    assert [plan.rows[0].suppress_ends for plan in (second, third)] == [True, True]
    scheduler.commit(second, [END])
    fourth = launched(scheduler, 4)
    assert not fourth.rows[0].suppress_ends
    assert fourth.plain
    assert scheduler.plan_step(5) is None, "the length is foreseen"
    scheduler.commit(third, [20])
    committed = scheduler.commit(fourth, [21])
    assert committed.tokens == 1
    (ended,) = scheduler.take_ended()
    assert list(ended.tokens[5:]) == [END, 20, 21]
    assert ended.outcome == Finished(7, FinishReason.LENGTH)


def test_a_zombie_keeps_its_pages_until_its_last_step() -> None:
    scheduler, seq = new(), sequence(1, max_tokens=9)
    added(scheduler, seq)
    plans = [launched(scheduler, 1), launched(scheduler, 2)]
    assert scheduler.commit(plans[0], [END]).zombies == 0
    assert seq.outcome == Finished(1, FinishReason.STOP, END)
    assert scheduler.pages.pages.used == 4
    assert scheduler.open == 0
    committed = scheduler.commit(plans[1], [33])
    assert (committed.zombies, committed.tokens, committed.deltas) == (1, 0, {})
    assert scheduler.pages.pages.used == 0
    assert seq.tokens[-1] == END, "what a zombie computed is nobody's"


def test_tokens_go_to_their_frontends_in_columns() -> None:
    scheduler = new()
    added(scheduler, sequence(1, client=b"a"), sequence(2, client=b"b"), sequence(3, client=b"a"))
    committed = scheduler.commit(launched(scheduler, 1), [20, 21, 22])
    assert {client: (d.request_ids, d.tokens) for client, d in committed.deltas.items()} == {
        b"a": ([1, 3], [20, 22]),
        b"b": ([2], [21]),
    }
    assert committed.tokens == 3


def test_the_first_in_the_queue_is_not_overtaken() -> None:
    scheduler = new(pages=5)
    added(scheduler, sequence(1, 5, 3), sequence(2, 9, 7), sequence(3, 1, 1))
    assert list(scheduler.running) == [1]
    assert [seq.id for seq in scheduler.waiting] == [2, 3], "the small one waits behind the large one"


def test_refusals() -> None:
    scheduler = new(pages=5, waiting=1)
    with pytest.raises(RequestError, match="need 5 KV pages of 4 tokens, the pool has 4") as caught:
        scheduler.add(sequence(1, 10, 7))
    assert caught.value.code is ErrorCode.KV_CAPACITY
    room = 1 + scheduler.rows.free
    for number in range(room):
        scheduler.add(sequence(2 + number))
    with pytest.raises(RequestError, match=f"{room} requests are waiting already") as caught:
        scheduler.add(sequence(2 + room))
    assert caught.value.code is ErrorCode.OVERLOADED
    assert scheduler.open == room


def test_masks_for_live_constrained_rows_alone() -> None:
    scheduler = new()
    plain, constrained, ended = sequence(1), sequence(2), sequence(3)
    constrained.constraint, ended.constraint = FakeConstraint("parity"), FakeConstraint("parity")
    added(scheduler, plain, constrained, ended)
    plan = launched(scheduler, 1)
    scheduler.abort(b"c", 3)
    assert plan.needs_mask
    assert scheduler.masks(plan) == [(constrained.row, constrained.constraint)]


def test_two_outcomes_are_a_bug() -> None:
    scheduler, seq = new(), sequence(1)
    added(scheduler, seq)
    scheduler.abort(b"c", 1)
    with pytest.raises(AssertionError, match="second outcome"):
        scheduler.end(seq, Finished(1, FinishReason.ABORT))


class Traffic(RuleBasedStateMachine):
    """Every order of arrivals, ends, launches and commits, with up to two steps in flight."""

    @initialize(
        rows=st.integers(1, 4),
        pages=st.integers(4, 20),
        step=st.integers(4, 20),
        chunk=st.integers(1, 20),
        full=st.integers(1, 6),
    )
    def start(self, rows: int, pages: int, step: int, chunk: int, full: int) -> None:
        self.scheduler = new(rows, pages, step, chunk, full)
        self.sequences: dict[int, Sequence] = {}
        self.in_flight: list[StepPlan] = []
        self.admitted: list[int] = []
        self.ended: list[int] = []
        self.steps = 0

    @rule(
        prompt=st.integers(1, 25),
        max_tokens=st.integers(1, 9),
        client=CLIENTS,
        low=st.integers(0, 3),
    )
    def add(self, prompt: int, max_tokens: int, client: bytes, low: int) -> None:
        seq = sequence(len(self.sequences) + 1, prompt, max_tokens, client, min(low, max_tokens))
        try:
            self.scheduler.add(seq)
        except RequestError:
            return
        self.sequences[seq.id] = seq

    @rule()
    def admit(self) -> None:
        self.admitted += [seq.id for seq in self.scheduler.admit_waiting()]

    @rule(number=st.integers(1, 30), client=CLIENTS)
    def abort(self, number: int, client: bytes) -> None:
        self.scheduler.abort(client, number)

    @rule(client=CLIENTS)
    def lose_a_frontend(self, client: bytes) -> None:
        self.scheduler.abort_client(client)
        assert all(seq.client != client for seq in (*self.scheduler.running.values(), *self.scheduler.waiting))

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.scheduler.running)))
        self.scheduler.fail(number, ErrorCode.ENGINE_FAILED, "x")
        assert isinstance(self.sequences[number].outcome, Failure)

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def launch(self) -> None:
        plan = self.scheduler.plan_step(self.steps + 1)
        if plan is None:
            for seq in self.scheduler.running.values():
                assert len(seq.tokens) + seq.unseen == seq.total_len, f"{seq} could run"
            return
        assert 1 <= plan.total_tokens <= self.scheduler.limits.max_step_tokens
        assert plan == StepPlan.of(plan.step_id, plan.rows, plan.admitted)
        for row in plan.rows:
            seq = self.sequences[row.seq_id]
            assert (row.row, row.start, seq.outcome) == (seq.row, seq.launched, None)
            assert row.samples == (row.end == len(seq.tokens) + seq.unseen)
            assert row.end < seq.total_len
        self.steps += 1
        self.scheduler.on_launch(plan)
        self.in_flight.append(plan)

    @precondition(lambda self: self.in_flight)
    @rule(tokens=st.lists(st.sampled_from([END, 20, 21]), min_size=4, max_size=4))
    def commit(self, tokens: list[int]) -> None:
        plan = self.in_flight.pop(0)
        zombies = sum(self.sequences[row.seq_id].outcome is not None for row in plan.rows)
        committed = self.scheduler.commit(plan, tokens[: len(plan.rows)])
        assert committed.zombies == zombies

    @rule()
    def take(self) -> None:
        self.ended += [seq.id for seq in self.scheduler.take_ended()]

    @invariant()
    def planning_changes_nothing(self) -> None:
        before = [repr(seq) for seq in self.sequences.values()]
        assert self.scheduler.plan_step(self.steps + 1) == self.scheduler.plan_step(self.steps + 1)
        assert [repr(seq) for seq in self.sequences.values()] == before

    @invariant()
    def everything_is_accounted_for(self) -> None:
        scheduler = self.scheduler
        assert scheduler.pages.pages.audit() == []
        holders = Counter(row.seq_id for plan in self.in_flight for row in plan.rows)
        samples = Counter(row.seq_id for plan in self.in_flight for row in plan.rows if row.samples)
        for seq in self.sequences.values():
            assert (seq.inflight, seq.unseen) == (holders[seq.id], samples[seq.id]), seq
            held = seq in scheduler.held
            assert held == (seq.id in scheduler.running or seq.inflight > 0), seq
            assert sorted(scheduler.pages.pages.owned().get(seq.id, [])) == sorted(seq.pages)
            assert bool(seq.pages) == held == (seq.row > 0)
            assert seq.generated <= seq.params.max_tokens
        rows = [seq.row for seq in scheduler.held]
        assert len(set(rows)) == len(rows)
        assert scheduler.rows.free + len(rows) == scheduler.rows.total

    @invariant()
    def each_ends_once(self) -> None:
        told = self.ended + [seq.id for seq in self.scheduler.ended]
        assert len(told) == len(set(told))
        assert set(told) == {seq.id for seq in self.sequences.values() if seq.outcome is not None}
        assert self.scheduler.open == len(self.sequences) - len(told)

    @invariant()
    def first_come_first_admitted(self) -> None:
        assert self.admitted == sorted(self.admitted)
        waiting = [seq.id for seq in self.scheduler.waiting]
        assert waiting == sorted(waiting)

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.fail_all(ErrorCode.SHUTTING_DOWN, "x")
            assert self.scheduler.pages.pages.used == 0
            assert self.scheduler.rows.free == self.scheduler.rows.total
            assert not self.scheduler.open
            assert all(seq.outcome is not None for seq in self.sequences.values())


Traffic.TestCase.settings = settings(deadline=None, max_examples=50, stateful_step_count=40, print_blob=True)
TestTraffic = Traffic.TestCase
