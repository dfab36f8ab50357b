"""Sleep and wake of the loop: what becomes of requests, of KV, and of other changes meanwhile."""

import logging
from collections.abc import Collection

import pytest

from tandem.engine_core.errors import SleepError, WeightsError
from tandem.protocol.commands import Abort, Goodbye, Pause, PauseMode, Resume, Sleep, SleepTag, UpdateWeights, WakeUp
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Answer, Failure, Finished, WeightFacts
from tests.fakes.model import reference
from tests.fakes.sleep_memory import FakeSleepMemory
from tests.fakes.weight_change import FakeWeightChange
from tests.support.recorded_engine import CLIENT, Bench

PROMPT = [3, 4, 5]
TICKS = 6


class Sleeper:
    """A bench whose KV is erased while it sleeps."""

    def __init__(self, depth: int = 2, rows: int = 4) -> None:
        self.memory = FakeSleepMemory(self._erase)
        self.bench = Bench(depth, rows, sleep=self.memory)
        self.calls = 100

    def _erase(self, tags: Collection[SleepTag]) -> None:
        assert not self.bench.engine.pipeline.in_flight, "memory released under a step in flight"
        if "kv_cache" in tags:
            self.bench.runtime.replace_weights(0)

    def begin(self, level: int = 1, mode: PauseMode = "abort") -> int:
        self.calls += 1
        self.bench.say(Sleep(self.calls, level, mode))
        return self.calls

    def wake(self, *tags: str) -> Answer:
        self.calls += 1
        self.bench.say(WakeUp(self.calls, list(tags)))
        self.tick(1)
        return self.answer(self.calls)

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Answer:
        call = self.begin(level, mode)
        self.tick()
        return self.answer(call)

    def tick(self, count: int = TICKS) -> None:
        for _ in range(count):
            self.bench.engine.tick()

    def answer(self, call: int) -> Answer:
        (answer,) = self.answers(call)
        return answer

    def answers(self, call: int) -> list[Answer]:
        replies = [event for _, event in self.bench.mailbox.replies if isinstance(event, Answer)]
        return [answer for answer in replies if answer.call == call]

    def failure(self, request_id: int) -> ErrorCode:
        outcome = self.bench.outcome(request_id)
        assert isinstance(outcome, Failure)
        return outcome.code


def running(depth: int, ticks: int = 4) -> Sleeper:
    """Return an engine of one row, with a request that runs and one that waits."""
    sleeper = Sleeper(depth, rows=1)
    for number in (1, 2):
        sleeper.bench.submit(number, 12)
    sleeper.tick(ticks)
    return sleeper


def whole(length: int = 12) -> list[int]:
    return reference(PROMPT, length, frozenset())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ticks", range(1, 7))
class TestModes:
    def test_abort_ends_every_open_request_once(self, depth: int, ticks: int) -> None:
        sleeper = running(depth, ticks)
        assert sleeper.sleep().ok
        assert [sleeper.failure(number) for number in (1, 2)] == [ErrorCode.ENGINE_SLEEPING] * 2
        assert sleeper.bench.at_rest() and sleeper.bench.scheduler.audit() == []
        assert sleeper.wake().ok
        sleeper.bench.submit(3, 12)
        sleeper.bench.finish()
        assert sleeper.bench.mailbox.received[CLIENT, 3] == whole()

    def test_wait_computes_every_open_request_first_and_refuses_new_ones(self, depth: int, ticks: int) -> None:
        sleeper = running(depth, ticks)
        call = sleeper.begin(mode="wait")
        sleeper.tick(1)
        sleeper.bench.submit(3, 4)
        sleeper.tick(60)
        assert sleeper.answer(call).ok and sleeper.bench.stats.sleeping
        for number in (1, 2):
            assert sleeper.bench.outcome(number) == Finished(number, FinishReason.LENGTH)
            assert sleeper.bench.mailbox.received[CLIENT, number] == whole()
        assert sleeper.failure(3) is ErrorCode.ENGINE_SLEEPING

    def test_keep_computes_open_requests_again_after_the_wake(self, depth: int, ticks: int) -> None:
        sleeper = running(depth, ticks)
        assert sleeper.sleep(mode="keep").ok
        assert not sleeper.bench.mailbox.outcomes
        before = dict(sleeper.bench.mailbox.received)
        sleeper.tick(5)
        assert sleeper.bench.mailbox.received == before
        assert sleeper.wake().ok
        sleeper.bench.finish()
        for number in (1, 2):
            assert sleeper.bench.mailbox.received[CLIENT, number] == whole()
        assert sleeper.bench.at_rest()


def test_requests_are_refused_while_it_sleeps_and_not_after() -> None:
    sleeper = Sleeper()
    assert sleeper.sleep().ok
    for number, wake in ((1, "kv_cache"), (2, "weights")):
        sleeper.bench.submit(number, 4)
        sleeper.tick(2)
        assert sleeper.failure(number) is ErrorCode.ENGINE_SLEEPING
        assert sleeper.wake(wake).ok
    sleeper.bench.submit(3, 4)
    sleeper.bench.finish()
    assert sleeper.bench.outcome(3) == Finished(3, FinishReason.LENGTH)
    assert sleeper.bench.stats.requests_failed == {"engine_sleeping": 2}


def test_nothing_of_the_prefix_cache_remains() -> None:
    sleeper = Sleeper()
    sleeper.bench.submit(1, 12)
    sleeper.bench.finish()
    assert sleeper.bench.memory.usage.cached
    sleeper.sleep()
    assert not sleeper.bench.memory.usage.cached
    sleeper.wake()
    sleeper.bench.submit(2, 12)
    sleeper.bench.finish()
    assert [start.cached_tokens for start in sleeper.bench.mailbox.starts[CLIENT, 2]] == [0]
    assert sleeper.bench.mailbox.received[CLIENT, 2] == whole()


def test_a_partial_wake_never_computes() -> None:
    for first, second in (("weights", "kv_cache"), ("kv_cache", "weights")):
        sleeper = running(2)
        sleeper.sleep(mode="keep")
        launched = sleeper.bench.stats.steps_launched
        assert sleeper.wake(first).ok and sleeper.bench.stats.sleeping
        sleeper.tick(5)
        assert sleeper.bench.stats.steps_launched == launched
        assert sleeper.wake(second).ok and not sleeper.bench.stats.sleeping
        sleeper.bench.finish()
        assert sleeper.bench.mailbox.received[CLIENT, 1] == whole()


def test_states_are_published_with_changing_in_between() -> None:
    sleeper = Sleeper()
    sleeper.sleep()
    sleeper.wake("weights")
    sleeper.wake()
    states = [(facts.state, facts.asleep) for facts in sleeper.bench.published]
    both = ["kv_cache", "weights"]
    assert states == [
        ("changing", []),
        ("sleeping", both),
        ("changing", []),
        ("sleeping", ["kv_cache"]),
        ("changing", []),
        ("ready", []),
    ]


def test_sleeping_twice_and_waking_an_awake_engine_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.engine_core.control")
    sleeper = Sleeper()
    assert sleeper.wake().ok and sleeper.memory.calls == [] and sleeper.bench.published == []
    assert sleeper.sleep().ok and sleeper.sleep(2).ok
    assert caplog.messages[-1].endswith("already sleeps at level 1")
    assert sleeper.memory.calls == ["release"]
    assert sleeper.wake().ok and sleeper.wake().ok
    assert sleeper.memory.calls == ["release", "restore"]


def test_a_wake_of_a_running_engine_does_not_wait_for_its_steps() -> None:
    sleeper = running(2)
    assert sleeper.wake().ok
    sleeper.bench.finish()
    assert sleeper.bench.mailbox.received[CLIENT, 1] == whole()


def test_a_lack_of_memory_leaves_it_asleep_and_the_wake_can_be_repeated() -> None:
    sleeper = running(2)
    sleeper.sleep(mode="keep")
    sleeper.memory.faults["restore"] = SleepError("200 bytes, but 100 are free", is_lack=True)
    answer = sleeper.wake()
    assert (answer.ok, answer.lacks_memory) == (False, True) and "200" in answer.message
    assert sleeper.bench.stats.sleeping and sleeper.bench.control.sleep.holds_rows
    assert sleeper.wake().ok
    sleeper.bench.finish()
    assert sleeper.bench.mailbox.received[CLIENT, 2] == whole()


def test_a_sleep_that_fails_goes_on_awake() -> None:
    sleeper = running(2)
    sleeper.memory.faults["release"] = SleepError("no room", is_lack=True)
    answer = sleeper.sleep(mode="keep")
    assert (answer.ok, answer.lacks_memory) == (False, True)
    assert not sleeper.bench.stats.sleeping
    sleeper.bench.finish()
    assert sleeper.bench.mailbox.received[CLIENT, 1] == whole()


def test_a_wake_before_the_sleep_cancels_it() -> None:
    sleeper = running(2)
    call = sleeper.begin(mode="wait")
    sleeper.tick(1)
    assert not sleeper.answers(call)
    assert sleeper.wake().ok and not sleeper.answer(call).ok
    sleeper.bench.submit(3, 4)
    sleeper.bench.finish()
    assert sleeper.bench.outcome(3) == Finished(3, FinishReason.LENGTH)
    assert sleeper.memory.calls == []


def test_a_second_sleep_ends_what_the_first_waits_for() -> None:
    sleeper = running(2)
    first = sleeper.begin(mode="wait")
    sleeper.tick(1)
    assert sleeper.sleep(2).ok and sleeper.answer(first).ok
    assert sleeper.failure(1) is ErrorCode.ENGINE_SLEEPING and not sleeper.memory.has_copy


class TestLevelTwo:
    def test_a_wake_of_everything_loads_the_weights_again(self) -> None:
        sleeper = Sleeper()
        sleeper.sleep(2)
        assert sleeper.wake().ok and sleeper.memory.contents == "disk"
        assert sleeper.bench.control.weights.facts == WeightFacts("", "ready")

    @pytest.mark.parametrize("order", [("weights", "kv_cache"), ("kv_cache", "weights")])
    def test_a_wake_by_tags_leaves_them_incomplete_until_they_are_replaced(self, order: tuple[str, str]) -> None:
        sleeper = running(2)
        sleeper.sleep(2, "keep")
        for tag in order:
            assert sleeper.wake(tag).ok
        sleeper.tick()
        weights = sleeper.bench.control.weights
        assert weights.facts.state == "incomplete" and weights.problem
        sleeper.bench.submit(3, 4)
        sleeper.tick(2)
        assert sleeper.failure(3) is ErrorCode.WEIGHTS_CHANGED
        assert not sleeper.bench.engine.pipeline.in_flight
        sleeper.bench.control.begin_change(FakeWeightChange("restart", lambda: "new"))
        sleeper.bench.finish()
        assert sleeper.bench.mailbox.received[CLIENT, 1] == whole()
        assert not sleeper.bench.control.sleep.has_dropped_weights

    def test_a_wake_of_everything_completes_them_too(self) -> None:
        sleeper = Sleeper()
        sleeper.sleep(2)
        sleeper.wake("weights")
        sleeper.wake("kv_cache")
        sleeper.memory.faults["reload"] = SleepError("the disk is gone")
        answer = sleeper.wake()
        assert (answer.ok, answer.lacks_memory) == (False, False)
        assert sleeper.bench.control.weights.facts.state == "incomplete"
        assert sleeper.wake().ok
        assert sleeper.bench.control.weights.facts == WeightFacts("", "ready")

    def test_weights_of_no_folder_stay_incomplete(self) -> None:
        sleeper = Sleeper()
        sleeper.memory.is_on_disk = False
        sleeper.sleep(2)
        assert sleeper.wake().ok
        facts = sleeper.bench.control.weights.facts
        assert facts.state == "incomplete" and "/wake_up" not in facts.problem, "it would load nothing"

    def test_weights_of_a_folder_are_loaded_by_a_wake_of_everything(self) -> None:
        sleeper = Sleeper()
        sleeper.sleep(2)
        assert sleeper.wake("weights").ok and sleeper.wake("kv_cache").ok
        facts = sleeper.bench.control.weights.facts
        assert facts.state == "incomplete" and "/wake_up" in facts.problem

    def test_weights_that_cannot_be_loaded_sleep_on(self) -> None:
        sleeper = Sleeper()
        sleeper.sleep(2)
        sleeper.memory.faults["reload"] = SleepError("the disk is gone")
        assert not sleeper.wake().ok
        assert sleeper.memory.awake == set() and sleeper.bench.stats.sleeping
        assert sleeper.wake().ok and sleeper.memory.contents == "disk"


class TestOtherChanges:
    def test_a_sleep_is_refused_while_weights_are_replaced(self) -> None:
        sleeper = running(2)
        sleeper.bench.control.begin_change(FakeWeightChange("wait", lambda: "new"))
        answer = sleeper.sleep()
        assert (answer.ok, answer.lacks_memory) == (False, False)
        sleeper.bench.finish()
        assert sleeper.sleep().ok

    def test_a_sleep_is_refused_within_an_update(self) -> None:
        sleeper = Sleeper()
        sleeper.bench.say(Pause(1, "keep"))
        sleeper.bench.control.begin_change(FakeWeightChange("restart", lambda: None))
        sleeper.tick()
        assert not sleeper.sleep().ok and sleeper.memory.calls == []

    def test_weights_that_are_incomplete_for_good_may_sleep(self) -> None:
        def fail() -> str:
            raise WeightsError("the disk is gone", is_intact=False)

        sleeper = Sleeper()
        sleeper.bench.control.begin_change(FakeWeightChange("restart", fail))
        sleeper.tick()
        assert sleeper.sleep().ok and sleeper.wake().ok
        assert sleeper.bench.control.weights.facts == WeightFacts("", "incomplete", "the disk is gone")

    def test_an_update_is_refused_while_the_weights_sleep(self) -> None:
        class Updates:
            is_receiving = False

            def __init__(self) -> None:
                self.calls = 0

            def call(self, *_: object) -> None:
                self.calls += 1

            def refuse(self, _: object, problem: str) -> str:
                return problem

            def advance(self) -> None:
                return None

            def abandon(self) -> None:
                return None

        sleeper, updates = Sleeper(), Updates()
        sleeper.bench.control.updates = updates
        sleeper.sleep(2)
        sleeper.bench.say(UpdateWeights(1, ["a"], ["float32"], [[1]]))
        sleeper.tick(2)
        assert not sleeper.answer(1).ok and not updates.calls
        sleeper.wake("weights")
        sleeper.bench.say(UpdateWeights(2, ["a"], ["float32"], [[1]]))
        sleeper.tick(2)
        assert updates.calls == 1, "an engine that sleeps counts as paused"

    @pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
    def test_a_pause_stays_in_force_over_a_sleep(self, mode: PauseMode) -> None:
        sleeper = Sleeper()
        sleeper.bench.say(Pause(1, mode))
        sleeper.tick()
        assert sleeper.sleep().ok and sleeper.wake().ok
        sleeper.bench.submit(1, 4)
        sleeper.tick()
        assert not sleeper.bench.mailbox.outcomes
        sleeper.bench.say(Resume(2))
        sleeper.bench.finish()
        assert sleeper.bench.outcome(1) == Finished(1, FinishReason.LENGTH)

    def test_a_resume_does_not_wake(self) -> None:
        sleeper = running(2)
        sleeper.bench.say(Pause(1, "keep"))
        sleeper.tick()
        sleeper.sleep(mode="keep")
        launched = sleeper.bench.stats.steps_launched
        sleeper.bench.say(Resume(2))
        sleeper.tick()
        assert sleeper.bench.stats.steps_launched == launched
        sleeper.wake()
        sleeper.bench.finish()
        assert sleeper.bench.mailbox.received[CLIENT, 1] == whole()

    def test_waiting_for_requests_that_a_pause_holds_is_refused(self) -> None:
        sleeper = running(2)
        sleeper.bench.say(Pause(1, "keep"))
        sleeper.tick()
        assert not sleeper.sleep(mode="wait").ok
        assert sleeper.sleep(mode="keep").ok


def test_requests_end_while_it_sleeps_as_they_do_otherwise() -> None:
    sleeper = running(2)
    sleeper.sleep(mode="keep")
    sleeper.bench.say(Abort([1]))
    sleeper.tick(2)
    assert sleeper.bench.outcome(1) == Finished(1, FinishReason.ABORT)
    sleeper.bench.say(Goodbye())
    sleeper.tick(2)
    assert sleeper.bench.at_rest()


def test_an_engine_that_stops_asleep_ends_its_requests() -> None:
    sleeper = running(2)
    sleeper.sleep(mode="keep")
    sleeper.bench.engine.stopping = True
    sleeper.bench.engine.run()
    assert [sleeper.failure(number) for number in (1, 2)] == [ErrorCode.SHUTTING_DOWN] * 2


def test_an_engine_without_such_memory_refuses() -> None:
    bench = Bench(2)
    bench.say(Sleep(1), WakeUp(2))
    bench.engine.tick()
    answers = [event for _, event in bench.mailbox.replies if isinstance(event, Answer)]
    assert [(answer.call, answer.ok) for answer in answers] == [(1, False), (2, False)]
    assert all("--enable-weight-updates" in answer.message for answer in answers)


@pytest.mark.parametrize("command", [Sleep(1, 3), WakeUp(1, ["x"])])
def test_unknown_words_are_refused(command: Sleep | WakeUp) -> None:
    sleeper = Sleeper()
    sleeper.bench.say(command)
    sleeper.tick(2)
    assert not sleeper.answer(1).ok and sleeper.memory.calls == []
