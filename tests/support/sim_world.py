"""One random traffic: an engine over the fake runtime, its arrivals, and the invariants between any two moves."""

import random
from collections import Counter
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items

from tandem.engine_core.contracts import MaskedRows, RunningMode, StepResult
from tandem.engine_core.engine import Engine
from tandem.engine_core.graph_sizes import DRAFT_SIZES, draft_sizes
from tandem.engine_core.kv_cache.manager import KVManager
from tandem.engine_core.kv_cache.page_classes import page_classes
from tandem.engine_core.kv_cache.pages import CACHE, PageAllocator
from tandem.engine_core.kv_cache.radix import RadixTree
from tandem.engine_core.kv_cache.sessions import Sessions
from tandem.engine_core.kv_cache.state_slots import StateSlots
from tandem.engine_core.kv_cache.states import StateCache
from tandem.engine_core.plan import PADDING_PAGE, StepPlan
from tandem.engine_core.scheduler.admission import RowGate
from tandem.engine_core.scheduler.audit import audit_lengths
from tandem.engine_core.scheduler.draft_policy import DraftPolicy
from tandem.engine_core.scheduler.planner import SchedulerLimits
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.scheduler.sleep_switch import SleepSwitch
from tandem.engine_core.scheduler.step_costs import AttentionShare, StepCosts
from tandem.engine_core.stats import new_stats
from tandem.protocol.commands import (
    Abort,
    EndSession,
    Goodbye,
    Hello,
    Inspect,
    Pause,
    PauseMode,
    Resume,
    SetPolicy,
    Sleep,
    SleepTag,
    WakeUp,
)
from tandem.protocol.engine_options import POLICIES
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import NO_LIMIT, Failure, Limits, ModelFacts
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.clock import FakeClock
from tests.fakes.constraint import FakeAdvancer, FakeCompiler
from tests.fakes.draft_model import FakeDraftModel
from tests.fakes.mailbox import FakeMailbox
from tests.fakes.model import END, VOCAB
from tests.fakes.runtime import FakeRuntime
from tests.fakes.sleep_memory import FakeSleepMemory
from tests.fakes.states import FakeStates
from tests.fakes.weight_change import FakeWeightChange
from tests.support.kv_pool import end_sessions, occupy
from tests.support.sim_traffic import CLIENTS, LONGEST, Shape, Traffic

EPOCH = 77
OPERATOR = b"operator"


class FaultyRuntime(FakeRuntime):
    """Raises device errors in one place: launch, sample or collect."""

    def __init__(
        self,
        max_rows: int,
        pages: int,
        page_size: int,
        windows: tuple[int | None, ...],
        chunk: int,
        states: FakeStates | None = None,
        *,
        fault: str,
        rng: random.Random,
    ) -> None:
        super().__init__(max_rows, pages, page_size, windows, chunk, states)
        self.fault = fault
        self.rng = rng

    on_launch: Callable[[StepPlan], None]

    def launch(self, slot: int, plan: StepPlan) -> None:
        self.on_launch(plan)
        self._maybe("launch")
        super().launch(slot, plan)

    def sample(self, slot: int, masks: MaskedRows | None) -> None:
        self._maybe("sample")
        super().sample(slot, masks)

    def collect(self, slot: int) -> StepResult:
        self._maybe("collect")
        return super().collect(slot)

    def _maybe(self, place: str) -> None:
        if self.fault == place and self.rng.random() < 0.03:
            raise RuntimeError(f"device lost in {place}")


class PoisoningAllocator(PageAllocator):
    """Erases on the device what is freed here: in stream order, since the device has run whatever was launched."""

    erase: Callable[[list[int]], None]

    def release(self, owner: int, pages: Items[int]) -> None:
        super().release(owner, pages)
        self.erase(list(pages))

    def is_shared(self, page: int) -> bool:
        """Return whether a page belongs to the prefix cache."""
        return self._owner[page] == CACHE


class PoisoningSlots(StateSlots):
    """Erases the checkpoints of slots that are freed."""

    erase: Callable[[int], None]

    def release(self, owner: int) -> int | None:
        slot = super().release(owner)
        if slot is not None:
            self.erase(slot)
        return slot


def guess(rng: random.Random, following: list[int]) -> list[int]:
    """Return drafts: all right, right up to one of them, any, or none."""
    kind = rng.randrange(4)
    if kind == 0 or not following:
        return following
    if kind == 1:
        wrong = rng.randrange(len(following))
        return [*following[:wrong], following[wrong] + 1, *following[wrong + 1 :]]
    if kind == 2:
        return [rng.randrange(VOCAB) for _ in range(rng.randint(0, len(following)))]
    return []


class World:
    """Builds the engine of one traffic and drives it through its mailbox."""

    def __init__(self, seed: int, shape: Shape) -> None:
        self.rng = rng = random.Random(seed)
        self.operators = random.Random(f"operators of {seed}")
        self.swaps = random.Random(f"swaps of {seed}")
        self.sleeps = random.Random(f"sleeps of {seed}")
        self.shape = shape
        self.clock = FakeClock()
        choices = random.Random(f"advancer of {seed}")
        self.advancer = FakeAdvancer(lambda: choices.random() < 0.8, is_remote=choices.random() < 0.5)
        self._build(random.Random(seed))
        self.scheduler.masks = self._check_masks  # type: ignore[method-assign]
        self.requests = Traffic(rng, shape).requests(rng.randint(1, shape.requests))
        self.arrivals = list(self.requests)
        self.aborted: set[tuple[bytes, int]] = set()
        self.forgotten: set[bytes] = set()
        """Frontends whose connection ended at some time, other than by vanishing."""
        self.pauses = self.num_swaps = self.num_sleeps = 0
        self.ticks = self.launches = self.overlaps = self.forced = 0
        self.mailbox.on_drain = self._before_tick
        self.mailbox.on_flush = self.check
        self.mailbox.on_wait = self._check_sleep
        self._seen_launched = 0
        for client in CLIENTS:
            self.mailbox.inbox.append((client, Hello(PROTOCOL_VERSION, EPOCH, client.decode())))

    def _build(self, times: random.Random) -> None:
        """Build the engine. times: draws what concerns the durations of steps."""
        rng, shape = self.rng, self.shape
        page_size = shape.page_size or rng.choice([1, 2, 4, 8, LONGEST] if shape.states is None else [1, 2, 4])
        pages = max(2, 1 + len(shape.windows) * (rng.randint(*shape.pages) * 2 // (page_size + 1)))
        max_rows = rng.randint(1, 6)
        whole = shape.static or rng.random() < 0.15
        step_tokens = rng.randint(max_rows, 40) + whole * LONGEST
        cache = rng.random() < 0.8 if shape.cache is None else shape.cache
        self.allocator = PoisoningAllocator(pages)
        classes = page_classes(shape.windows, page_size)
        tree = RadixTree(page_size, classes, pages + 64) if cache and not shape.static else None
        self.states, recurrent, grid = None, None, 0
        if shape.states is not None:
            interval, slots = times.choice([4, 8]), PoisoningSlots(times.randint(*shape.states))
            grid = 0 if whole else interval * times.choice([1, 2, 4])
            recurrent = FakeStates(max_rows, slots.total, interval)
            slots.erase = recurrent.free
            self.states = None if tree is None else StateCache(slots, tree, interval, grid)
        max_lead = 0 if shape.drafts is None else shape.depth * DRAFT_SIZES[-1]
        self.memory = KVManager(
            self.allocator,
            page_size,
            tree,
            Sessions(tree, rng.randint(0, 3), rng.choice([5, 1e9])),
            shape.windows,
            max_lead,
            self.states,
        )
        chunk = min(step_tokens, LONGEST)
        self.runtime = FaultyRuntime(
            max_rows, pages, page_size, shape.windows, max(chunk, 1 + max_lead), recurrent, fault=shape.faults, rng=rng
        )
        self.allocator.erase = self.runtime.free
        self.runtime.is_shared = self.allocator.is_shared
        self.runtime.on_launch = self._check_announced
        limits = SchedulerLimits(
            step_tokens,
            0 if whole else rng.randint(1, step_tokens),
            rng.choice([3, 100]),
            rng.choice([0, 0, 1, 2]),
            rng.choice([LONGEST, 1000]),
            shape.static,
            times.choice([None, 0.1, 8.0]),
            grid,
        )
        self.rows = RowGate(max_rows)
        policy = "fcfs" if shape.static else shape.policy or rng.choice(POLICIES)
        costs = None
        if times.random() < 0.5:
            costs = StepCosts({(1, 0): 1.0, (0, 2): 2.0, (0, 8): 4.0, (0, 32): 10.0}, AttentionShare(0.01, 0.01))
            self.runtime.time_of = lambda plan: times.choice([0.0, 0.5, 1.0, 5.0]) * len(plan.rows)
        drafts = None
        if shape.drafts is not None:
            sizes = draft_sizes("ngram", shape.drafts or "auto")
            drafts = DraftPolicy(sizes, shape.drafts or None, has_model=shape.draft_model)
            if shape.draft_model:
                self.runtime.draft_model = FakeDraftModel(max_rows)
            guesses = random.Random(f"drafts of {times.random()}")
            self.runtime.draft = lambda following: guess(guesses, following)
        self.scheduler = Scheduler(self.rows, self.memory, limits, policy, costs, drafts)
        self.compiler = FakeCompiler(lambda: rng.choice([0, 0, 1, 5, 40]))
        self.mailbox = FakeMailbox()
        facts = ModelFacts("fake", VOCAB, LONGEST, [END], "", "cpu", "float32", 0)
        self.operated = not shape.calm and self.operators.random() < 0.5
        """Whether operators limit the load, pause the engine and end connections."""
        load = (
            (self.operators.randint(1, 8), self.operators.randint(1, 3 * LONGEST))
            if self.operated
            else (NO_LIMIT, NO_LIMIT)
        )
        wire_limits = Limits(max_rows, 0, page_size, step_tokens, 100, *load)
        self.engine = Engine.assemble(
            self.scheduler,
            self.runtime,
            self.mailbox,
            self.compiler,
            depth=shape.depth,
            epoch=EPOCH,
            model=facts,
            limits=wire_limits,
            stats=new_stats(),
            clock=self.clock,
            stage_clock=self.clock,
            advancer=self.advancer,
            sleep=SleepSwitch(FakeSleepMemory(self._lose)),
        )
        self.pipeline = self.engine.pipeline

    def _before_tick(self) -> None:
        """Check the invariants between two ticks; then add arrivals and disturbances."""
        self.check()
        self.ticks += 1
        self.clock.now += 0.1
        assert self.ticks < 4000, (
            f"no progress: {list(self.scheduler.waiting)} {self.scheduler.running} {self.pipeline} {self.allocator}"
        )
        rng = self.rng
        while self.arrivals and rng.random() < 0.5:
            request = self.arrivals.pop(0)
            self.mailbox.inbox.append((request.client, request.submit))
        if not self.shape.calm:
            self._disturb()
        launched = self.engine.stats.steps_launched
        if launched > self._seen_launched:
            self.launches += 1
            self.overlaps += len(self.pipeline.steps) > 1
        self._seen_launched = launched
        idle = not self.scheduler.num_open and not self.scheduler.updates.ended and not self.pipeline.in_flight
        if idle and not self.arrivals and not self.mailbox.inbox:
            self.check_at_rest()
            self.engine.stopping = True

    def _check_masks(self, plan: StepPlan) -> MaskedRows:
        """Check that a step has masks for the rows that sample under a grammar a token which is not known."""
        held = {seq.id: seq for seq in self.scheduler.held}
        rows = [(row, held[row.seq_id]) for row in plan.rows if row.constrained and row.samples]
        masks = type(self.scheduler).masks(self.scheduler, plan)
        assert masks == [
            (row.row, seq.constraint)
            for row, seq in rows
            if seq.outcome is None and row.start + row.length >= len(seq.tokens)
        ]
        return masks

    def _check_announced(self, plan: StepPlan) -> None:
        """Check that frontends were told of every sequence in a step before its launch."""
        held = {seq.id: seq for seq in self.scheduler.held}
        for row in plan.rows:
            seq = held[row.seq_id]
            assert (seq.client, seq.request_id) in self.mailbox.announced, f"launched before its start was sent: {seq}"

    def _check_sleep(self) -> None:
        """Check that a loop that falls asleep has nothing to do: every open request waits for a grammar, or is held."""
        assert not self.pipeline.in_flight
        pause, weights = self.engine.control.pause, self.engine.control.weights
        sleep = self.engine.control.sleep
        if sleep.asleep or not weights.is_complete:
            assert bool(self.engine.stats.sleeping) == bool(sleep.asleep)
            assert sleep.due is None and not sleep.wakes
            return
        if weights.change is not None and pause.mode is None:
            assert weights.change.running == "wait" and self.scheduler.num_begun
            return
        if pause.mode is not None:
            assert self.engine.stats.paused
            assert pause.holds_rows or not self.scheduler.num_begun
            return
        assert self.scheduler.num_open == len(self.scheduler.compiling), (
            f"asleep: {list(self.scheduler.waiting)} {self.scheduler.running} {self.allocator} {self.memory.tree}"
        )

    def _disturb(self) -> None:
        """Abort requests, let frontends vanish, and send an operator's commands."""
        rng = self.rng
        if rng.random() < 0.06:
            victim = rng.choice(self.requests)
            self.aborted.add(victim.key)
            if victim in self.arrivals:
                self.arrivals.remove(victim)
            self.mailbox.inbox.append((victim.client, Abort([victim.request_id, 10_000])))
        if rng.random() < 0.01:
            self.mailbox.gone.add(rng.choice(CLIENTS))
        if self.operated:
            self._operate()
        if rng.random() < 0.05:
            self._manage()

    def _operate(self) -> None:
        """End connections, and pause the engine for a while."""
        rng = self.operators
        if rng.random() < 0.01:
            self._part(rng.choice(CLIENTS))
        if self.engine.control.pause.mode is None and rng.random() < 0.03:
            self.pauses += 1
            mode: PauseMode = rng.choice(("keep", "keep", "wait", "abort"))
            self.mailbox.inbox.append((self._operator(), Pause(4, mode, rng.random() < 0.3)))
        elif self.engine.control.pause.mode is not None and rng.random() < 0.2:
            self.mailbox.inbox.append((self._operator(), Resume(5)))
        control = self.engine.control
        if control.weights.change is None and not control.sleep.takes_weights and self.swaps.random() < 0.03:
            self._swap()
        self._sleep_or_wake(control.sleep)

    def _sleep_or_wake(self, sleep: SleepSwitch) -> None:
        """Have the engine sleep, or wake it whole or in part."""
        rng, is_complete = self.sleeps, self.engine.control.weights.is_complete
        if rng.random() < 0.01:
            mode: PauseMode = rng.choice(("keep", "keep", "wait", "abort"))
            self.mailbox.inbox.append((self._operator(rng), Sleep(6, rng.choice((1, 2)), mode)))
        elif (sleep.refuses_new or not is_complete) and rng.random() < 0.2:
            tags = rng.choice(([], ["weights"], ["kv_cache"]))
            self.mailbox.inbox.append((self._operator(rng), WakeUp(7, tags)))

    def _lose(self, tags: Collection[SleepTag]) -> None:
        """Erase all KV, as a sleep does."""
        assert not self.pipeline.in_flight
        if "kv_cache" in tags:
            self.runtime.replace_weights(0)
        self.num_sleeps += 1

    def _swap(self) -> None:
        """Have the weights replaced by equal ones, and all KV erased, once nothing is in flight."""
        mode: RunningMode = self.swaps.choice(("wait", "abort", "restart", "restart"))

        def replace() -> str:
            assert not self.pipeline.in_flight
            self.runtime.replace_weights(0)
            self.num_swaps += 1
            return str(self.num_swaps)

        deadline = self.clock.now + self.swaps.choice([0.5, 1e9])
        self.engine.control.begin_change(FakeWeightChange(mode, replace, deadline))

    def _part(self, client: bytes) -> None:
        """End the connection of a frontend as a Goodbye or its lease does; sometimes it says Hello again."""
        self.forgotten.add(client)
        if self.operators.random() < 0.5:
            self.mailbox.inbox.append((client, Goodbye()))
        elif self.engine.control.forget(client):
            self.scheduler.abort_client(client)
        if self.operators.random() < 0.5:
            self.mailbox.inbox.append((client, Hello(PROTOCOL_VERSION, EPOCH, client.decode())))

    def _operator(self, rng: random.Random | None = None) -> bytes:
        """Return a frontend that the engine listens to."""
        if not self.engine.control.clients:
            self.mailbox.inbox.append((OPERATOR, Hello(PROTOCOL_VERSION, EPOCH, "operator")))
            return OPERATOR
        return (rng or self.operators).choice(sorted(self.engine.control.clients))

    def happened(self) -> dict[str, int]:
        """Return how often each event happened."""
        outcomes = [outcome for outcomes in self.mailbox.outcomes.values() for outcome in outcomes]
        busy = [o for o in outcomes if isinstance(o, Failure) and o.code is ErrorCode.SESSION_BUSY]
        talks = {request.key for request in self.requests if request.session}
        hits = {key for key, cached in self.mailbox.cached.items() if cached}
        return {
            "pauses": self.pauses,
            "swaps": self.num_swaps,
            "sleeps": self.num_sleeps,
            "overloaded": len([o for o in outcomes if isinstance(o, Failure) and o.code is ErrorCode.OVERLOADED]),
            "hit": self.memory.num_hit_tokens,
            "evicted": self.memory.usage.num_evicted,
            "cache hits reported": len(hits),
            "preemptions": self.scheduler.preemptions,
            "for lack of pages": self.scheduler.preemptions - self.forced,
            "session busy": len(busy),
            "sessions evicted": self.memory.sessions.num_evicted,
            "session hits": len(talks & hits),
            "states saved": self.runtime.recurrent.saved if self.runtime.recurrent is not None else 0,
            "states loaded": self.runtime.recurrent.loaded if self.runtime.recurrent is not None else 0,
            "states evicted": self.states.slots.num_evicted if self.states is not None else 0,
        }

    def _manage(self) -> None:
        """Send an operator's command, and preempt a sequence for no reason."""
        rng = self.rng
        command = rng.choice([SetPolicy(1, rng.choice(POLICIES)), EndSession(2, rng.choice("xyz")), Inspect(3)])
        self.mailbox.inbox.append((CLIENTS[0], command))
        victims = [seq for seq in self.scheduler.running.values() if not seq.finishing]
        if victims and rng.random() < 0.5:
            self.forced += 1
            self.scheduler.preempt(rng.choice(victims))

    def check(self) -> None:
        """Check the invariants that hold whenever the scheduler is between two moves."""
        holders = Counter(row.seq_id for step in self.pipeline.steps for row in step.plan.rows)
        readers: dict[int, bytes] = {}
        for seq in self.scheduler.held:
            assert seq.inflight == holders.pop(seq.id, 0), f"inflight differs from the pipeline: {seq} {self.pipeline}"
            assert 0 <= seq.inflight <= self.pipeline.depth, seq
            assert 0 <= seq.num_inflight_samples <= seq.inflight, seq
            assert 0 <= seq.num_inflight_drafts <= DRAFT_SIZES[-1] * seq.inflight, seq
            for page in {page for table in seq.pages for page in table} - {PADDING_PAGE}:
                assert readers.setdefault(page, seq.cache.namespace) == seq.cache.namespace, (
                    f"page {page} is read under two namespaces"
                )
        accepted = [*self.scheduler.waiting, *self.scheduler.compiling.values(), *self.scheduler.held]
        unanswered = [
            seq.prompt_len
            for seq in accepted
            if seq.outcome is None and not seq.generated and seq.submit.sampling.choice == 0
        ]
        assert self.scheduler.queued.num_tokens == sum(unanswered)
        assert self.scheduler.num_open <= self.engine.control.limits.max_concurrent
        assert not holders, f"steps hold sequences whose leases are closed: {holders}"
        assert self.scheduler.audit() == []
        if not self.runtime.fault:  # Else a step may be counted that never ran.
            step = self.pipeline.unsampled()
            unsampled = {row.seq_id for row in step.plan.rows if row.samples} if step is not None else set()
            assert audit_lengths(self.scheduler.held, self.runtime.lengths, unsampled) == []

    def check_at_rest(self) -> None:
        """Check after the last tick that every resource came back and every request ended exactly once."""
        assert not self.scheduler.num_open
        assert not self.scheduler.compiling
        assert not self.compiler.jobs, "grammars are compiled for no request"
        assert not list(self.scheduler.held)
        assert self.scheduler.audit() == []
        assert self.rows.free == self.rows.total
        assert all(session.turn is None for session in self.memory.sessions.known)
        assert self.memory.usage.available == self.allocator.total
        if self.states is not None:
            assert all(owner in self.memory.tree for owner in self.states.slots.owners)
        for key, outcomes in self.mailbox.outcomes.items():
            assert len(outcomes) == 1, f"{key} ended {len(outcomes)} times: {outcomes}"

    def check_after_the_end(self) -> None:
        """Check that everything the cache or a session keeps can be reclaimed."""
        self.check_at_rest()
        end_sessions(self.memory)
        assert self.memory.usage.in_use == 0
        occupy(self.memory, self.allocator.total)
        assert self.memory.usage.cached == 0
        assert self.states is None or not self.states.slots.used
