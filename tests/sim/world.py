"""One random traffic: an engine over the fake runtime, its arrivals, and what must hold between any two moves."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from engine_core.contracts import Masks
from engine_core.control import Control
from engine_core.engine import Engine
from engine_core.errors import RowError
from engine_core.kv_cache.pages import PageAllocator
from engine_core.pipeline import PipelineState
from engine_core.plan import StepPlan
from engine_core.scheduler.admission import PageGate, RowGate
from engine_core.scheduler.scheduler import Scheduler, SchedulerLimits
from engine_core.stats import StageClock, new_stats
from protocol.codec import pack_ids
from protocol.commands import Abort, Hello, Submit
from protocol.errors import ErrorCode, FinishReason
from protocol.events import Limits, ModelFacts
from protocol.params import SamplingParams
from protocol.version import PROTOCOL_VERSION
from tests.fakes.clock import FakeClock
from tests.fakes.constraint import FakeCompiler, FakeConstraint, FakeVerifier
from tests.fakes.mailbox import FakeMailbox
from tests.fakes.model import END, VOCAB, reference
from tests.fakes.runtime import FakeRuntime

EPOCH = 77
GRAMMARS: tuple[Callable[[random.Random], str], ...] = (
    lambda _: "parity",
    lambda _: "runs",
    lambda rng: f"runs {rng.randint(1, 20)}",
    lambda rng: f"stops {rng.randint(1, 20)}",
    lambda rng: f"dies {rng.randint(0, 20)}",
    lambda rng: f"breaks {rng.randint(0, 20)}",
    lambda rng: rng.choice(["parity", "bad"]),
)
"""How often each rule of `FakeConstraint` comes up."""
CLIENTS = (b"client-a", b"client-b", b"client-c")


@dataclass(frozen=True)
class Request:
    client: bytes
    request_id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    grammar: str | None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def key(self) -> tuple[bytes, int]:
        return self.client, self.request_id

    @property
    def end_ids(self) -> frozenset[int]:
        return frozenset() if self.params.ignore_eos else frozenset({END})

    def reference(self) -> tuple[list[int], str]:
        """Its tokens, and how it ends: a FinishReason or an ErrorCode."""
        if self.grammar == "bad":
            return [], ErrorCode.INVALID_GRAMMAR
        constraint = FakeConstraint(self.grammar) if self.grammar else None
        params, ends = self.params, self.end_ids
        tokens = reference(self.prompt, params.max_tokens, ends, params.min_tokens, constraint)
        if constraint and constraint.problem:
            return tokens, ErrorCode.GRAMMAR_FAILED
        stopped = (tokens[-1] in ends and len(tokens) > params.min_tokens) or (constraint and constraint.complete)
        return tokens, FinishReason.STOP if stopped else FinishReason.LENGTH


@dataclass(frozen=True)
class Shape:
    """What a traffic is drawn from."""

    depth: int
    constrained: float
    faults: str = ""


class FaultyRuntime(FakeRuntime):
    """Raises in one place: "row" fails a row before anything is enqueued, the others are device errors."""

    def __init__(self, *sizes: int, fault: str, rng: random.Random) -> None:
        super().__init__(*sizes)
        self.fault = fault
        self.rng = rng
        self.raised = 0

    def launch(self, slot: int, plan: StepPlan) -> None:
        if self.fault == "row" and self.rng.random() < 0.1:
            self.raised += 1
            victim = self.rng.choice(plan.rows)
            raise RowError(victim.seq_id, ErrorCode.ENGINE_FAILED, "this row cannot be staged")
        self._maybe("launch")
        super().launch(slot, plan)

    def sample(self, slot: int, masks: Masks | None) -> None:
        self._maybe("sample")
        super().sample(slot, masks)

    def collect(self, slot: int) -> list[int]:
        self._maybe("collect")
        return super().collect(slot)

    def _maybe(self, place: str) -> None:
        if self.fault == place and self.rng.random() < 0.03:
            self.raised += 1
            raise RuntimeError(f"device lost in {place}")


class World:
    """Builds the engine of one traffic and drives it through its mailbox."""

    def __init__(self, seed: int, shape: Shape) -> None:
        self.rng = rng = random.Random(seed)
        self.shape = shape
        page_size = rng.choice([1, 2, 4])
        pages = rng.randint(12, 90)
        max_rows = rng.randint(1, 6)
        step_tokens = rng.randint(max_rows, 40)
        self.pages = PageAllocator(pages)
        self.runtime = FaultyRuntime(max_rows, pages, page_size, fault=shape.faults, rng=rng)
        limits = SchedulerLimits(step_tokens, rng.randint(1, step_tokens), rng.choice([3, 100]))
        self.rows = RowGate(max_rows)
        self.scheduler = Scheduler(self.rows, PageGate(self.pages, page_size), limits, FakeVerifier())
        self.compiler = FakeCompiler(lambda: rng.choice([0, 0, 1, 5, 40]))
        self.pipeline = PipelineState(shape.depth)
        self.mailbox = FakeMailbox()
        stats, clock = new_stats(), FakeClock()
        facts = ModelFacts("fake", VOCAB, 48, [END], "", "cpu", "float32", 0)
        wire_limits = Limits(max_rows, 0, page_size, step_tokens, 100)
        self.control = Control(self.scheduler, self.compiler, EPOCH, facts, wire_limits, stats, clock)
        self.engine = Engine(
            self.scheduler,
            self.pipeline,
            self.runtime,
            self.mailbox,
            self.control,
            self.compiler,
            stats,
            StageClock(stats.stage_seconds, clock),
        )
        self.requests = [self._request(number) for number in range(rng.randint(1, 14))]
        self.arrivals = list(self.requests)
        self.aborted: set[tuple[bytes, int]] = set()
        self.ticks = 0
        self.launches = 0
        self.overlaps = 0
        self.mailbox.on_drain = self._before_tick
        self.mailbox.on_flush = self.check
        self._seen_launched = 0
        for client in CLIENTS:
            self.mailbox.inbox.append((client, Hello(PROTOCOL_VERSION, EPOCH, client.decode())))

    def _request(self, number: int) -> Request:
        rng = self.rng
        max_tokens = rng.randint(1, 18)
        grammar = rng.choice(GRAMMARS)(rng) if rng.random() < self.shape.constrained else None
        params = SamplingParams(
            max_tokens,
            min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
            ignore_eos=rng.random() < 0.2,
        )
        prompt = tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 32)))
        tops = [rng.choice([0, 1, 5]) if rng.random() < 0.2 else None for _ in range(2)]
        return Request(rng.choice(CLIENTS), number, prompt, params, grammar, *tops)

    def _before_tick(self) -> None:
        """Arrivals, aborts and vanishing frontends; then whatever must hold between two ticks."""
        self.check()
        self.ticks += 1
        assert self.ticks < 4000, f"no progress: {self.scheduler.waiting} {self.scheduler.running} {self.pipeline}"
        rng = self.rng
        while self.arrivals and rng.random() < 0.5:
            request = self.arrivals.pop(0)
            self.mailbox.inbox.append(
                (
                    request.client,
                    Submit(
                        request.request_id,
                        pack_ids(request.prompt),
                        request.params,
                        request.grammar,
                        request.logprobs,
                        request.prompt_logprobs,
                    ),
                )
            )
        if rng.random() < 0.06:
            victim = rng.choice(self.requests)
            self.aborted.add(victim.key)
            if victim in self.arrivals:
                self.arrivals.remove(victim)
            self.mailbox.inbox.append((victim.client, Abort([victim.request_id, 10_000])))
        if rng.random() < 0.01:
            self.mailbox.gone.add(rng.choice(CLIENTS))
        launched = self.engine.stats.steps_launched
        if launched > self._seen_launched:
            self.launches += 1
            self.overlaps += self.pipeline.in_flight > 1
        self._seen_launched = launched
        if not self.arrivals and not self.scheduler.open and not self.pipeline.in_flight and not self.mailbox.inbox:
            self.engine.stopping = True

    def check(self) -> None:
        """The invariants, whenever the scheduler is between two moves."""
        holders = Counter(row.seq_id for step in self.pipeline.steps for row in step.plan.rows)
        for seq in self.scheduler.held:
            assert seq.inflight == holders.pop(seq.id, 0), f"inflight differs from the pipeline: {seq} {self.pipeline}"
            assert 0 <= seq.inflight <= self.pipeline.depth, seq
            assert 0 <= seq.unseen <= seq.inflight, seq
        assert not holders, f"steps hold sequences whose leases are closed: {holders}"
        assert self.pages.audit() == []
        owned = self.pages.owned()
        for seq in self.scheduler.held:
            assert sorted(seq.pages) == sorted(owned.pop(seq.id)), seq
        assert not owned, f"pages of nobody: {owned}"

    def check_at_rest(self) -> None:
        """After the last tick: everything came back, and everybody was told exactly once."""
        assert self.pages.free == self.pages.total
        assert self.rows.free == self.rows.total
        assert not self.scheduler.open
        assert not self.scheduler.compiling
        assert not self.compiler.jobs, "grammars are compiled for nobody"
        assert not list(self.scheduler.held)
        for key, outcomes in self.mailbox.outcomes.items():
            assert len(outcomes) == 1, f"{key} ended {len(outcomes)} times: {outcomes}"
