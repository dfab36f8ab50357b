"""An engine over fakes, with a runtime that records its calls."""

from typing import Any

from tandem.engine_core.contracts import MaskedRows, SleepMemory, StepResult
from tandem.engine_core.engine import Engine
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.scheduler.admission import RowGate
from tandem.engine_core.scheduler.planner import SchedulerLimits
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.scheduler.sleep_switch import SleepSwitch
from tandem.engine_core.stats import new_stats
from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Hello, Submit
from tandem.protocol.events import Failure, Finished, Limits, ModelFacts, WeightFacts
from tandem.protocol.params import SamplingParams
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.clock import FakeClock
from tests.fakes.constraint import FakeAdvancer, FakeCompiler
from tests.fakes.mailbox import FakeMailbox
from tests.fakes.model import END, VOCAB
from tests.fakes.runtime import FakeRuntime
from tests.support.kv_pool import kv_memory

EPOCH, CLIENT = 7, b"client"


class RecordingRuntime(FakeRuntime):
    """Fake runtime that records every call as "launch 3", by step id, and raises the faults set for a call."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.calls: list[str] = []
        self.steps: dict[int, int] = {}
        self.faults: dict[str, Exception] = {}

    def _note(self, move: str, slot: int) -> None:
        self.calls.append(f"{move} {self.steps[slot]}")
        fault = self.faults.pop(self.calls[-1], None)
        if fault is not None:
            raise fault

    def stage(self, slot: int, plan: StepPlan) -> None:
        self.calls.append(f"stage {plan.step_id}")
        super().stage(slot, plan)

    def launch(self, slot: int, plan: StepPlan) -> None:
        self.steps[slot] = plan.step_id
        self._note("launch", slot)
        super().launch(slot, plan)

    def prefetch_masks(self, slot: int, masks: MaskedRows) -> None:
        self._note("prefetch masks", slot)
        super().prefetch_masks(slot, masks)

    def sample(self, slot: int, masks: MaskedRows | None) -> None:
        self._note("sample", slot)
        super().sample(slot, masks)

    def collect(self, slot: int) -> StepResult:
        self._note("collect", slot)
        return super().collect(slot)


class Bench:
    """One engine over fakes, and a frontend that has said Hello."""

    def __init__(self, depth: int, rows: int = 4, pages: int = 100, sleep: SleepMemory | None = None) -> None:
        self.runtime = RecordingRuntime(rows, pages, 4)
        self.memory = kv_memory(pages)
        self.scheduler = Scheduler(RowGate(rows), self.memory, SchedulerLimits(64, 64, 50))
        self.mailbox, self.clock, self.stats = FakeMailbox(), FakeClock(), new_stats()
        facts = ModelFacts("fake", VOCAB, 64, [END], "", "cpu", "float32", 0)
        self.compiler, self.advancer = FakeCompiler(), FakeAdvancer()
        limits = Limits(rows, 0, 4, 64, 50)
        self.published: list[WeightFacts] = []
        self.engine = Engine.assemble(
            self.scheduler,
            self.runtime,
            self.mailbox,
            self.compiler,
            depth=depth,
            epoch=EPOCH,
            model=facts,
            limits=limits,
            stats=self.stats,
            clock=self.clock,
            stage_clock=self.clock,
            advancer=self.advancer,
            sleep=SleepSwitch(sleep),
            publish_weights=self.published.append,
        )
        self.control = self.engine.control
        self.say(Hello(PROTOCOL_VERSION, EPOCH, "test"))

    def say(self, *commands: Any, client: bytes = CLIENT) -> None:
        self.mailbox.inbox.extend((client, command) for command in commands)

    def submit(
        self, request_id: int, max_tokens: int, constraint: str | None = None, client: bytes = CLIENT, group: int = 0
    ) -> None:
        params = SamplingParams(max_tokens, ignore_eos=True)
        self.say(Submit(request_id, pack_ids([3, 4, 5]), params, constraint, group=group), client=client)

    def tick_calls(self) -> list[str]:
        before = len(self.runtime.calls)
        self.engine.tick()
        return self.runtime.calls[before:]

    def finish(self) -> None:
        for _ in range(200):
            if not self.engine.tick() and not self.scheduler.num_open:
                return
        raise AssertionError(f"never idle: {self.engine.pipeline} {list(self.scheduler.held)}")

    def outcome(self, request_id: int, client: bytes = CLIENT) -> Finished | Failure:
        (outcome,) = self.mailbox.outcomes[client, request_id]
        return outcome

    def at_rest(self) -> bool:
        return not self.scheduler.num_open and not list(self.scheduler.held) and self.memory.usage.in_use == 0
