"""The scheduler alone, under a state machine that plays engine and device in every order."""

from collections import Counter
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.engine_core.errors import RequestError
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.scheduler.admission import RowGate
from tandem.engine_core.scheduler.planner import SchedulerLimits
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.sequence import Sequence
from tandem.protocol.engine_options import POLICIES, Policy
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Failure
from tandem.protocol.params import SamplingParams
from tests.support.effort import machine
from tests.support.kv_pool import end_sessions, kv_memory
from tests.support.scheduling import commit, submitted

END = 1
CLIENTS = st.sampled_from([b"a", b"b"])
SESSIONS = st.sampled_from(["", "", "", "x", "y"])


class Traffic(RuleBasedStateMachine):
    """Every order of arrivals, ends, launches and commits, with up to two steps in flight."""

    @initialize(
        rows=st.integers(1, 4),
        pages=st.integers(4, 20),
        step=st.integers(4, 20),
        chunk=st.integers(1, 20),
        full=st.integers(1, 6),
        page_size=st.sampled_from([1, 4, 64]),
        cache=st.booleans(),
        policy=st.sampled_from(POLICIES),
        windows=st.sampled_from([(None,), (None,), (None, 7, 7), (9,), (None, 10, 3)]),
    )
    def start(
        self,
        rows: int,
        pages: int,
        step: int,
        chunk: int,
        full: int,
        page_size: int,
        cache: bool,
        policy: Policy,
        windows: tuple[int | None, ...],
    ) -> None:
        pages = max(2, pages * 4 // page_size * len(windows))
        self.scheduler = Scheduler(
            RowGate(rows),
            kv_memory(pages, page_size, cache, 2, windows=windows),
            SchedulerLimits(step, chunk, full),
            policy,
        )
        self.sequences: dict[int, Sequence] = {}
        self.in_flight: list[StepPlan] = []
        self.ended: list[int] = []
        self.steps = 0

    @rule(
        prompt=st.integers(1, 25),
        max_tokens=st.integers(1, 9),
        client=CLIENTS,
        low=st.integers(0, 3),
        first=st.sampled_from([10, 10, 50]),
        priority=st.integers(-1, 1),
        session=SESSIONS,
        verified=st.sampled_from([0, 0, 0, 1, 6, 24]),
    )
    def add(
        self,
        prompt: int,
        max_tokens: int,
        client: bytes,
        low: int,
        first: int,
        priority: int,
        session: str,
        verified: int,
    ) -> None:
        number = len(self.sequences) + 1
        fields: dict[str, Any] = {"priority": priority, "session": session}
        if verified := min(verified, prompt - 1):
            max_tokens = 1
            fields |= {"prompt_logprobs": 0, "num_verified": verified}
        params = SamplingParams(max_tokens, min_tokens=min(low, max_tokens))
        seq = submitted(number, range(first, first + prompt), params, frozenset({END}), client, **fields)
        try:
            self.scheduler.add(seq)
        except RequestError:
            return
        self.sequences[seq.id] = seq

    @rule()
    def admit(self) -> None:
        self.scheduler.admit_waiting()

    @rule(policy=st.sampled_from(POLICIES))
    def change_policy(self, policy: Policy) -> None:
        self.scheduler.set_policy(policy)

    @rule(session=SESSIONS)
    def end_session(self, session: str) -> None:
        self.scheduler.memory.sessions.end(session)

    @precondition(lambda self: any(not seq.finishing for seq in self.scheduler.running.values()))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        victims = sorted(seq.id for seq in self.scheduler.running.values() if not seq.finishing)
        self.scheduler.preempt(self.sequences[data.draw(st.sampled_from(victims))])

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
        self.scheduler.end(self.sequences[number], Failure(number, ErrorCode.ENGINE_FAILED, "x"))
        assert number not in self.scheduler.running

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def launch(self) -> None:
        plan = self.scheduler.plan_step(self.steps + 1)
        if plan is None:
            idle = [seq for seq in self.scheduler.running.values() if not seq.finishing]
            assert not idle or (self.in_flight and self.scheduler.planner.out_of_pages), f"{idle} could run"
            return
        assert 1 <= plan.total_tokens <= self.scheduler.limits.max_step_tokens
        assert plan == StepPlan.of(plan.step_id, plan.rows, plan.admitted, plan.logprobs)
        for row in plan.rows:
            seq = self.sequences[row.seq_id]
            assert (row.row, row.start, seq.outcome) == (seq.row, seq.num_scheduled_tokens, None)
            assert row.samples == (row.end == len(seq.tokens) + seq.num_inflight_samples)
            assert row.end < seq.total_len
        self.steps += 1
        self.scheduler.on_launch(plan)
        self.in_flight.append(plan)

    @precondition(lambda self: self.in_flight)
    @rule(tokens=st.lists(st.sampled_from([END, 20, 21]), min_size=4, max_size=4))
    def commit(self, tokens: list[int]) -> None:
        plan = self.in_flight.pop(0)
        zombies = sum(self.sequences[row.seq_id].outcome is not None for row in plan.rows)
        updates = commit(self.scheduler, plan, tokens[: len(plan.rows)])
        assert updates.num_zombies == zombies
        self.ended += [seq.id for seq in updates.ended]

    @rule()
    def take(self) -> None:
        self.ended += [seq.id for seq in self.scheduler.take_updates().ended]

    @invariant()
    def planning_again_gives_the_same(self) -> None:
        plan = self.scheduler.plan_step(self.steps + 1)
        before = [repr(seq) for seq in self.sequences.values()]
        assert self.scheduler.plan_step(self.steps + 1) == plan
        assert [repr(seq) for seq in self.sequences.values()] == before

    @invariant()
    def everything_is_accounted_for(self) -> None:
        scheduler = self.scheduler
        assert scheduler.audit() == []
        holders = Counter(row.seq_id for plan in self.in_flight for row in plan.rows)
        samples = Counter(row.seq_id for plan in self.in_flight for row in plan.rows if row.samples)
        for seq in self.sequences.values():
            assert (seq.inflight, seq.num_inflight_samples) == (holders[seq.id], samples[seq.id]), seq
            held = seq in scheduler.held
            assert held == (seq.id in scheduler.running or seq.inflight > 0), seq
            assert bool(seq.pages) == held == (seq.row > 0)
            assert seq.generated <= seq.submit.sampling.max_tokens
        rows = [seq.row for seq in scheduler.held]
        assert len(set(rows)) == len(rows)

    @invariant()
    def each_ends_once(self) -> None:
        reported = self.ended + [seq.id for seq in self.scheduler.updates.ended]
        assert len(reported) == len(set(reported))
        assert set(reported) == {seq.id for seq in self.sequences.values() if seq.outcome is not None}
        assert self.scheduler.num_open == len(self.sequences) - len(reported)

    @invariant()
    def busy_sessions_have_a_turn(self) -> None:
        for session in self.scheduler.memory.sessions.known:
            if session.turn is not None:
                assert self.sequences[session.turn].outcome is None

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.fail_all(ErrorCode.SHUTTING_DOWN, "x")
            self.scheduler.abandon()
            end_sessions(self.scheduler.memory)
            assert self.scheduler.audit() == []
            assert self.scheduler.memory.usage.in_use == 0
            assert self.scheduler.rows.free == self.scheduler.rows.total
            assert not self.scheduler.num_open
            assert all(seq.outcome is not None for seq in self.sequences.values())


Traffic.TestCase.settings = machine(60, 50)
TestTraffic = Traffic.TestCase
