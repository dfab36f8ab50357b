"""The loop's order of moves, and what it does when something goes wrong."""

from typing import Any

import pytest

from engine_core.contracts import Masks
from engine_core.engine import FAREWELL_TRIES, Engine
from engine_core.errors import FatalError, RowError
from engine_core.kv_cache.pages import PageAllocator
from engine_core.pipeline import PipelineState
from engine_core.plan import StepPlan
from engine_core.scheduler.admission import PageGate, RowGate
from engine_core.scheduler.scheduler import Scheduler, SchedulerLimits
from engine_core.stats import StageClock, new_stats
from protocol.codec import pack_ids
from protocol.commands import Abort, Goodbye, Hello, Submit
from protocol.errors import ErrorCode, FinishReason
from protocol.events import Failure, Finished, Limits, ModelFacts, Ready
from protocol.params import SamplingParams
from protocol.version import PROTOCOL_VERSION
from tests.fakes.clock import FakeClock
from tests.fakes.mailbox import FakeMailbox
from tests.fakes.model import END, VOCAB, reference
from tests.fakes.runtime import FakeRuntime
from tests.sim.world import ConstrainingControl

EPOCH, CLIENT = 7, b"client"


class RecordingRuntime(FakeRuntime):
    """Writes down every call as "launch 3", by the step's number; raises where it is told to."""

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

    def launch(self, slot: int, plan: StepPlan) -> None:
        self.steps[slot] = plan.step_id
        self._note("launch", slot)
        super().launch(slot, plan)

    def sample(self, slot: int, masks: Masks | None) -> None:
        self._note("sample", slot)
        super().sample(slot, masks)

    def collect(self, slot: int) -> list[int]:
        self._note("collect", slot)
        return super().collect(slot)


class Bench:
    """One engine over fakes, and a frontend that has said Hello."""

    def __init__(self, depth: int, rows: int = 4, pages: int = 100) -> None:
        self.runtime = RecordingRuntime(rows, pages, 4)
        self.pages = PageAllocator(pages)
        self.scheduler = Scheduler(RowGate(rows), PageGate(self.pages, 4), SchedulerLimits(64, 64, 50))
        self.mailbox, self.clock, self.stats = FakeMailbox(), FakeClock(), new_stats()
        facts = ModelFacts("fake", VOCAB, 64, [END], "", "cpu", "float32", 0)
        self.control = ConstrainingControl(
            self.scheduler, EPOCH, facts, Limits(rows, 0, 4, 64, 50), self.stats, self.clock
        )
        self.engine = Engine(
            self.scheduler,
            PipelineState(depth),
            self.runtime,
            self.mailbox,
            self.control,
            self.stats,
            StageClock(self.stats.stage_seconds, self.clock),
        )
        self.say(Hello(PROTOCOL_VERSION, EPOCH, "test"))

    def say(self, *commands: Any, client: bytes = CLIENT) -> None:
        self.mailbox.inbox.extend((client, command) for command in commands)

    def submit(self, request_id: int, max_tokens: int, constrained: bool = False, client: bytes = CLIENT) -> None:
        if constrained:
            self.control.constrained |= {(client, request_id)}
        params = SamplingParams(max_tokens, ignore_eos=True)
        self.say(Submit(request_id, pack_ids([3, 4, 5]), params), client=client)

    def tick_calls(self) -> list[str]:
        before = len(self.runtime.calls)
        self.engine.tick()
        return self.runtime.calls[before:]

    def finish(self) -> None:
        for _ in range(200):
            if not self.engine.tick() and not self.scheduler.open:
                return
        raise AssertionError(f"never idle: {self.engine.pipeline} {list(self.scheduler.held)}")

    def outcome(self, request_id: int, client: bytes = CLIENT) -> Finished | Failure:
        (outcome,) = self.mailbox.outcomes[client, request_id]
        return outcome

    def at_rest(self) -> bool:
        return not self.scheduler.open and not list(self.scheduler.held) and self.pages.used == 0


class TestOrder:
    def test_one_step_in_flight(self) -> None:
        bench = Bench(1)
        bench.submit(1, 3)
        assert [bench.tick_calls() for _ in range(5)] == [
            ["launch 1", "sample 1"],
            ["collect 1", "launch 2", "sample 2"],
            ["collect 2", "launch 3", "sample 3"],
            ["collect 3"],
            [],
        ]

    def test_two_steps_in_flight(self) -> None:
        """In steady decode a step is launched while another one runs, and the one before that is collected first."""
        bench = Bench(2)
        bench.submit(1, 5)
        assert [bench.tick_calls() for _ in range(7)] == [
            ["launch 1", "sample 1"],
            ["launch 2", "sample 2"],
            ["collect 1", "launch 3", "sample 3"],
            ["collect 2", "launch 4", "sample 4"],
            ["collect 3", "launch 5", "sample 5"],
            ["collect 4", "collect 5"],
            [],
        ]

    def test_masks_at_depth_two(self) -> None:
        """The mask needs the tokens of the step before: sampling waits for its commit, the launch does not."""
        bench = Bench(2)
        bench.submit(1, 4, constrained=True)
        assert [bench.tick_calls() for _ in range(6)] == [
            ["launch 1"],
            ["sample 1", "launch 2"],
            ["collect 1", "sample 2", "launch 3"],
            ["collect 2", "sample 3", "launch 4"],
            ["collect 3", "sample 4", "collect 4"],
            [],
        ]

    def test_masks_at_depth_one(self) -> None:
        bench = Bench(1)
        bench.submit(1, 2, constrained=True)
        assert [bench.tick_calls() for _ in range(4)] == [
            ["launch 1"],
            ["sample 1", "collect 1", "launch 2"],
            ["sample 2", "collect 2"],
            [],
        ]

    def test_a_constrained_row_among_others_holds_its_steps_only(self) -> None:
        bench = Bench(2)
        bench.submit(1, 8)
        bench.submit(2, 1, constrained=True)
        assert bench.tick_calls() == ["launch 1"]
        assert bench.tick_calls() == ["sample 1", "launch 2", "sample 2"], "step 2 has no constrained row"
        assert bench.tick_calls() == ["collect 1", "launch 3", "sample 3"]

    @pytest.mark.parametrize("depth", [1, 2])
    def test_an_idle_engine_touches_nothing(self, depth: int) -> None:
        bench = Bench(depth)
        assert not bench.engine.tick()
        assert bench.runtime.calls == []

    @pytest.mark.parametrize("depth", [1, 2])
    def test_it_never_sleeps_on_work_that_just_became_possible(self, depth: int) -> None:
        """The commit that empties the pipeline may free the row that the next request waits for."""
        bench = Bench(depth, rows=1)
        bench.submit(1, 3)
        bench.submit(2, 3)
        while not bench.mailbox.outcomes.get((CLIENT, 2)):
            busy = bench.engine.tick()
            assert busy or not bench.scheduler.waiting, "asleep beside a request that could run"


class TestRun:
    def run(self, bench: Bench, ticks: int) -> None:
        """Runs for so many drains, then stops."""
        left = [ticks]

        def on_drain() -> None:
            left[0] -= 1
            bench.engine.stopping = left[0] <= 0

        bench.mailbox.on_drain = on_drain
        bench.engine.run()

    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_stop_ends_what_is_open_once(self, depth: int) -> None:
        bench = Bench(depth, rows=1)
        for request_id in (1, 2):
            bench.submit(request_id, 30)
        self.run(bench, 5)
        for request_id in (1, 2):
            outcome = bench.outcome(request_id)
            assert isinstance(outcome, Failure)
            assert outcome.code is ErrorCode.SHUTTING_DOWN
        tokens = bench.mailbox.received[CLIENT, 1]
        assert tokens == reference([3, 4, 5], 30, frozenset())[: len(tokens)]
        assert bench.at_rest()
        assert bench.stats.requests_failed == {"shutting_down": 2}

    @pytest.mark.parametrize("place", ["launch 2", "sample 2", "collect 1"])
    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_device_error_is_fatal_and_told_once(self, place: str, depth: int) -> None:
        bench = Bench(depth, rows=1)
        for request_id in (1, 2):
            bench.submit(request_id, 30)
        bench.runtime.faults[place] = RuntimeError("device lost")
        with pytest.raises(FatalError, match="device lost") as caught:
            self.run(bench, 50)
        assert isinstance(caught.value.__cause__, RuntimeError)
        for request_id in (1, 2):
            outcome = bench.outcome(request_id)
            assert isinstance(outcome, Failure)
            assert outcome.code is ErrorCode.ENGINE_FAILED
            assert "RuntimeError: device lost" in outcome.message
        calls = len(bench.runtime.calls)
        assert bench.runtime.calls[-1] == place, "the device is not touched again"
        assert bench.at_rest()
        assert calls == len(bench.runtime.calls)

    def test_a_row_error_fails_one_request(self) -> None:
        bench = Bench(2)
        for request_id in (1, 2):
            bench.submit(request_id, 3)
        bench.runtime.faults["launch 1"] = RowError(1, ErrorCode.INVALID_VALUE, "no")
        bench.finish()
        assert bench.outcome(1) == Failure(1, ErrorCode.INVALID_VALUE, "no")
        assert bench.outcome(2) == Finished(2, FinishReason.LENGTH)
        assert bench.runtime.calls[:3] == ["launch 1", "launch 1", "sample 1"], "the step's number is used again"

    def test_output_that_cannot_go_is_tried_again_then_given_up(self, caplog: pytest.LogCaptureFixture) -> None:
        bench = Bench(2)
        bench.mailbox.stuck = True
        waits: list[float] = []
        bench.mailbox.wait = waits.append  # type: ignore[method-assign]
        bench.engine.stopping = True
        bench.engine.run()
        assert len(waits) == FAREWELL_TRIES
        assert "did not read" in caplog.text

    def test_an_idle_loop_with_a_backlog_sleeps_briefly(self) -> None:
        bench = Bench(2)
        waits: list[float] = []
        bench.mailbox.wait = waits.append  # type: ignore[method-assign]
        flushes: list[int] = []
        bench.mailbox.stuck = True
        bench.mailbox.on_flush = lambda: flushes.append(1)
        assert not bench.engine.tick()
        assert flushes, "a backlog is retried each tick"
        bench.mailbox.stuck = False
        self.run(bench, 2)
        assert waits[0] > 0.1


class TestFrontends:
    def test_commands_are_answered(self) -> None:
        bench = Bench(2)
        bench.say(Submit(5, b"", SamplingParams(1)))
        bench.engine.tick()
        assert [type(event) for _, event in bench.mailbox.replies] == [Ready]
        assert isinstance(bench.outcome(5), Failure)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_vanished_frontend(self, depth: int) -> None:
        bench = Bench(depth)
        bench.say(Hello(PROTOCOL_VERSION, EPOCH, "other"), client=b"other")
        bench.submit(1, 30)
        bench.submit(1, 6, client=b"other")
        for _ in range(3):
            bench.engine.tick()
        bench.mailbox.gone.add(CLIENT)
        bench.finish()
        assert CLIENT not in bench.control.clients
        assert bench.outcome(1, b"other") == Finished(1, FinishReason.LENGTH)
        assert bench.mailbox.received[b"other", 1] == reference([3, 4, 5], 6, frozenset())
        assert bench.stats.requests_finished["abort"] == 1
        assert bench.at_rest()

    @pytest.mark.parametrize("command", [Abort([1]), Goodbye()], ids=["abort", "goodbye"])
    def test_leaving_in_flight_makes_zombies(self, command: Any) -> None:
        bench = Bench(2)
        bench.submit(1, 30)
        for _ in range(2):
            bench.engine.tick()
        bench.say(command)
        bench.finish()
        assert bench.outcome(1) == Finished(1, FinishReason.ABORT)
        assert bench.stats.zombie_rows == 2
        assert bench.at_rest()


def test_counting() -> None:
    bench = Bench(2, rows=2)
    for request_id, max_tokens in ((1, 4), (2, 2), (3, 3)):
        bench.submit(request_id, max_tokens)
    bench.say(Submit(4, b"", SamplingParams(1)))
    bench.engine.tick()
    stats = bench.stats
    assert (stats.running, stats.waiting, stats.pages_used) == (2, 1, 4)
    bench.clock.advance(2.0)
    bench.finish()
    bench.engine.tick()
    assert (stats.running, stats.waiting, stats.pages_used, stats.steps_in_flight) == (0, 0, 0, 0)
    assert stats.requests_accepted == 3
    assert stats.requests_finished == {"stop": 0, "length": 3, "abort": 0}
    assert stats.requests_failed == {"invalid_value": 1}
    assert (stats.prompt_tokens, stats.generation_tokens, stats.zombie_rows) == (9, 9, 0)
    assert stats.steps_launched == stats.steps_committed == sum(stats.step_rows.counts)
    assert sum(stats.queue_time.counts) == 3
    assert stats.queue_time.total == 2.0
    assert stats.step_rows.total == 9.0
