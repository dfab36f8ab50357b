"""Changes of the weights between two steps of the loop."""

from itertools import count

import pytest

from tandem.engine_core.contracts import RunningMode
from tandem.engine_core.errors import WeightsError
from tandem.protocol.commands import Inspect, Pause, Resume
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished, Started, WeightFacts
from tests.fakes.model import reference
from tests.fakes.weight_change import FakeWeightChange
from tests.support.recorded_engine import CLIENT, Bench

PROMPT = [3, 4, 5]


def running(depth: int, length: int = 12, ticks: int = 5) -> Bench:
    """Return an engine of one row, with a request that has some tokens and one that waits."""
    bench = Bench(depth, rows=1)
    bench.submit(1, length)
    bench.submit(2, length)
    for _ in range(ticks):
        bench.engine.tick()
    return bench


def change(bench: Bench, mode: RunningMode, deadline: float = float("inf")) -> FakeWeightChange:
    """Begin a change to weights 9."""

    def replace() -> str:
        assert not bench.engine.pipeline.in_flight
        bench.runtime.replace_weights(9)
        return "new"

    begun = FakeWeightChange(mode, replace, deadline)
    bench.control.begin_change(begun)
    return begun


def whole(weights: int, prompt: list[int], length: int = 12) -> list[int]:
    return reference(prompt, length, frozenset(), weights=weights)


@pytest.mark.parametrize("depth", [1, 2])
class TestModes:
    def test_wait_lets_running_requests_end_and_computes_the_others_with_the_new_weights(self, depth: int) -> None:
        bench = running(depth)
        begun = change(bench, "wait")
        bench.finish()
        assert begun.problems == [""]
        assert bench.mailbox.received[CLIENT, 1] == whole(0, PROMPT)
        assert bench.mailbox.received[CLIENT, 2] == whole(9, PROMPT)
        assert bench.at_rest()

    def test_wait_admits_a_preempted_request_again_before_the_change(self, depth: int) -> None:
        bench = running(depth)
        (seq,) = bench.scheduler.running.values()
        bench.scheduler.preempt(seq)
        change(bench, "wait")
        bench.finish()
        assert bench.mailbox.received[CLIENT, 1] == whole(0, PROMPT)
        assert bench.mailbox.received[CLIENT, 2] == whole(9, PROMPT)

    def test_wait_lets_all_sequences_of_a_request_end(self, depth: int) -> None:
        bench = Bench(depth, rows=1)
        for number in (1, 2, 3):
            bench.submit(number, 6, group=1)
        bench.submit(4, 6, group=4)
        while (CLIENT, 1) not in bench.mailbox.outcomes:
            bench.engine.tick()
        assert not bench.scheduler.running or next(iter(bench.scheduler.running.values())).request_id == 2
        change(bench, "wait")
        bench.submit(5, 6, group=4)
        bench.finish()
        for number, weights in {1: 0, 2: 0, 3: 0, 4: 9, 5: 9}.items():
            assert bench.mailbox.received[CLIENT, number] == whole(weights, PROMPT, 6), number
        assert bench.at_rest()

    def test_wait_lets_a_sequence_end_that_is_read_later_than_the_first_of_its_request(self, depth: int) -> None:
        bench = Bench(depth, rows=2)
        times = count()
        bench.engine.stages.clock = lambda: float(next(times))  # A tick with work reads one command.
        bench.submit(1, 1, group=1)
        bench.engine.tick()
        bench.say(*[Inspect(number) for number in range(20)])
        bench.submit(2, 6, group=1)
        bench.submit(3, 6)
        begun = change(bench, "wait")
        bench.finish()
        assert begun.problems == [""]
        for number, length, weights in ((1, 1, 0), (2, 6, 0), (3, 6, 9)):
            assert bench.mailbox.received[CLIENT, number] == whole(weights, PROMPT, length), number

    def test_wait_lets_a_sequence_end_whose_grammar_is_being_compiled(self, depth: int) -> None:
        bench = Bench(depth, rows=2)
        bench.submit(1, 6, group=1)
        bench.compiler.delay = lambda: 20
        bench.submit(2, 6, "parity", group=1)
        for _ in range(3):
            bench.engine.tick()
        begun = change(bench, "wait")
        while not begun.problems:
            bench.engine.tick()
        assert {number for _, number in bench.mailbox.outcomes} == {1, 2}

    def test_abort_ends_all_sequences_of_a_request_that_has_begun(self, depth: int) -> None:
        bench = Bench(depth, rows=1)
        for number, group in ((1, 1), (2, 1), (3, 3)):
            bench.submit(number, 12, group=group)
        for _ in range(4):
            bench.engine.tick()
        change(bench, "abort")
        bench.finish()
        for number in (1, 2):
            outcome = bench.outcome(number)
            assert isinstance(outcome, Failure) and outcome.code is ErrorCode.WEIGHTS_CHANGED
        assert bench.mailbox.received[CLIENT, 3] == whole(9, PROMPT)
        assert bench.at_rest()

    def test_abort_ends_requests_that_have_begun(self, depth: int) -> None:
        bench = running(depth)
        change(bench, "abort")
        bench.finish()
        outcome = bench.outcome(1)
        assert isinstance(outcome, Failure) and outcome.code is ErrorCode.WEIGHTS_CHANGED
        assert bench.mailbox.received[CLIENT, 2] == whole(9, PROMPT)
        assert bench.at_rest()

    def test_restart_continues_the_text_with_the_new_weights(self, depth: int) -> None:
        bench = running(depth)
        change(bench, "restart")
        for _ in range(4):
            bench.engine.tick()
        starts = [started for started in bench.mailbox.starts[CLIENT, 1] if started.weight_version]
        (before,) = [started.generated for started in starts]
        bench.finish()
        text = bench.mailbox.received[CLIENT, 1]
        old = whole(0, PROMPT)[:before]
        assert before > 0 and text == old + whole(9, PROMPT + old, 12 - before)
        assert bench.outcome(1) == Finished(1, FinishReason.LENGTH)
        assert bench.at_rest()

    def test_no_page_of_other_weights_is_found(self, depth: int) -> None:
        bench = Bench(depth)
        bench.submit(1, 12)
        bench.finish()
        change(bench, "restart")
        bench.engine.tick()
        assert bench.memory.usage.cached == 0
        bench.submit(2, 12)
        bench.finish()
        assert bench.mailbox.starts[CLIENT, 2] == [Started(2, 0, "new", 0)]


def test_keep_continues_with_its_kv_and_shares_none() -> None:
    bench = running(1)
    (seq,) = bench.scheduler.running.values()
    bench.control.begin_change(FakeWeightChange("keep", lambda: "new"))
    bench.finish()
    assert bench.outcome(1) == Finished(1, FinishReason.LENGTH)
    assert seq.cache.is_stale and seq.preemptions == 0
    # The second request may have found pages of the first one under the same weights only.
    assert [s.cached_tokens for s in bench.mailbox.starts[CLIENT, 2]] == [0]


def test_change_is_cancelled_at_its_deadline() -> None:
    bench = running(2, length=30)
    begun = change(bench, "wait", deadline=bench.clock.now + 1)
    bench.engine.tick()
    assert not begun.problems
    bench.clock.now += 2
    bench.engine.tick()
    assert len(begun.problems) == 1 and begun.problems != [""]
    bench.finish()
    assert bench.mailbox.received[CLIENT, 2] == whole(0, PROMPT, 30)


@pytest.mark.parametrize("is_intact", [True, False])
def test_failed_change(is_intact: bool) -> None:
    def fail() -> str:
        raise WeightsError("the disk is gone", is_intact=is_intact)

    bench = running(2)
    begun = FakeWeightChange("restart", fail)
    bench.control.begin_change(begun)
    if is_intact:
        bench.finish()
        assert bench.mailbox.received[CLIENT, 1] == whole(0, PROMPT)
        return
    for _ in range(4):
        bench.engine.tick()
    assert begun.problems == ["the disk is gone"]
    assert bench.control.weights.facts == WeightFacts("", "incomplete", "the disk is gone")
    bench.submit(3, 4)
    bench.engine.tick()
    for number in (1, 2, 3):
        outcome = bench.outcome(number)
        assert isinstance(outcome, Failure) and outcome.code is ErrorCode.WEIGHTS_CHANGED
    change(bench, "restart")
    bench.engine.tick()
    bench.submit(4, 4)
    bench.finish()
    assert bench.mailbox.received[CLIENT, 4] == whole(9, PROMPT, 4)


def test_nothing_is_computed_until_the_weights_are_complete() -> None:
    bench = running(2)
    bench.control.begin_change(FakeWeightChange("restart", lambda: None))
    for _ in range(4):
        bench.engine.tick()
    launched = bench.stats.steps_launched
    bench.submit(3, 4)
    for _ in range(4):
        bench.engine.tick()
    assert bench.stats.steps_launched == launched
    assert bench.control.weights.facts.state == "incomplete"
    change(bench, "restart")
    bench.finish()
    assert bench.mailbox.received[CLIENT, 3] == whole(9, PROMPT, 4)


def test_change_during_a_pause_leaves_rows_paused() -> None:
    bench = running(2)
    bench.say(Pause(7, "keep"))
    for _ in range(3):
        bench.engine.tick()
    begun = change(bench, "restart")
    bench.engine.tick()
    assert begun.problems == [""]
    launched = bench.stats.steps_launched
    for _ in range(3):
        bench.engine.tick()
    assert bench.stats.steps_launched == launched
    bench.say(Resume(8))
    bench.finish()
    assert bench.mailbox.received[CLIENT, 2] == whole(9, PROMPT)


def test_state_of_the_weights_is_published() -> None:
    bench, published = running(2), list[WeightFacts]()
    bench.engine.publish_weights = published.append
    change(bench, "restart")
    for _ in range(4):
        bench.engine.tick()
    assert published == [WeightFacts("", "changing"), WeightFacts("new", "ready")]
