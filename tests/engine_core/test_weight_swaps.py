"""The life of a swap, over fakes of the loop and of the stager."""

from collections.abc import Callable

import pytest

from tandem.engine_core.errors import WeightsError
from tandem.engine_core.scheduler.weight_switch import WeightSwitch
from tandem.engine_core.weight_swaps import MAX_VERSION_BYTES, WeightSwaps
from tandem.engine_core.weight_version import WeightVersion
from tandem.protocol.commands import CancelSwap, InspectSwap, Pause, Resume, SwapMode, SwapWeights
from tandem.protocol.events import Answer, SwapFacts
from tests.fakes.checkpoint_stager import FakeStager
from tests.fakes.model import reference
from tests.support.recorded_engine import CLIENT, Bench


class SwapBench(Bench):
    """An engine that swaps to weights 9."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__(depth, rows=2)
        self.stager, self.saved = FakeStager(), list[tuple[str, str]]()
        self.problem, self.loading = "", list[SwapFacts]()
        switch = WeightSwitch("0")
        self.control.weights, self.memory.weights = switch, switch.version
        self.active_path = "/base"
        self.swaps = WeightSwaps(
            switch, self.stager, self._load, lambda: self.active_path, lambda *given: self.saved.append(given)
        )
        self.control.swaps = self.swaps

    def _load(self, path: str, progress: Callable[[int, int], None]) -> None:
        for percent in (0, 50):
            progress(percent, 100)
            self.loading.append(self.swaps.facts)
        if self.problem:
            raise WeightsError(self.problem, is_intact=True)
        self.runtime.replace_weights(9)
        self.active_path = path

    def stage(self, result: str) -> None:
        """Tick once with the stager at work, and once with its result."""
        self.engine.tick()
        self.stager.outcome = result
        self.engine.tick()

    @property
    def answers(self) -> list[Answer]:
        return [event for _, event in self.mailbox.replies if isinstance(event, Answer)]


def test_a_swap_answers_once_its_weights_serve() -> None:
    bench = SwapBench()
    bench.say(SwapWeights(5, "/new", root="/"), InspectSwap(6))
    bench.engine.tick()
    assert bench.stager.root == "/"
    (asked,) = bench.answers
    assert asked == Answer(6, True, swap=SwapFacts("staging", "/new", 40, "/base", "0"))
    bench.stage("")
    for _ in range(2):
        bench.engine.tick()
    assert bench.answers[1:] == [Answer(5, True, swap=SwapFacts("idle", "", 0, "/new", "1"))]
    assert (bench.stager.paths, bench.saved) == (["/new"], [("/new", "1")])
    assert bench.loading == [SwapFacts("loading", "/new", percent, "/base", "0") for percent in (0, 50)]
    bench.submit(1, 6)
    bench.finish()
    assert bench.mailbox.received[CLIENT, 1] == reference([3, 4, 5], 6, frozenset(), weights=9)
    assert [started.weight_version for started in bench.mailbox.starts[CLIENT, 1]] == ["1"]


@pytest.mark.parametrize("mode", ["wait", "abort", "restart"])
def test_requests_go_on_with_the_old_weights_while_a_checkpoint_is_staged(mode: SwapMode) -> None:
    bench = SwapBench()
    bench.say(SwapWeights(5, "/new", mode))
    bench.submit(1, 6)
    bench.finish()
    assert bench.mailbox.received[CLIENT, 1] == reference([3, 4, 5], 6, frozenset())
    bench.stage("")
    bench.finish()
    assert bench.active_path == "/new" and bench.at_rest()


def test_a_checkpoint_that_does_not_fit_is_refused_while_serving_continues() -> None:
    bench = SwapBench()
    bench.submit(1, 20)
    bench.say(SwapWeights(5, "/new"))
    bench.stage("the architecture is another")
    (answer,) = bench.answers
    assert (answer.call, answer.ok, answer.message) == (5, False, "the architecture is another")
    assert bench.swaps.facts == SwapFacts("idle", "", 0, "/base", "0", "the architecture is another")
    assert bench.stager.num_released == 1
    bench.finish()
    assert bench.mailbox.received[CLIENT, 1] == reference([3, 4, 5], 20, frozenset())
    assert bench.saved == []


def test_a_staged_checkpoint_is_activated_by_a_second_swap() -> None:
    bench = SwapBench()
    bench.say(SwapWeights(5, "/new", activate=False))
    bench.stage("")
    (answer,) = bench.answers
    assert answer.ok and answer.swap is not None and answer.swap.state == "staged"
    assert not bench.stager.num_released
    bench.say(SwapWeights(6, "/new", version="step-200"))
    for _ in range(3):
        bench.engine.tick()
    assert bench.stager.num_released == 1
    assert bench.stager.paths == ["/new"]
    assert bench.answers[1:] == [Answer(6, True, swap=SwapFacts("idle", "", 0, "/new", "step-200"))]


def swap(bench: SwapBench, version: str) -> str:
    """Swap weights; return the version that serves, or the reason of a refusal."""
    call = len(bench.answers) + 1
    bench.say(SwapWeights(call, "/new", version=version))
    bench.engine.tick()
    if bench.swaps.facts.state == "staging":
        bench.stage("")
    for _ in range(2):
        bench.engine.tick()
    answer = bench.answers[-1]
    assert answer.call == call and answer.swap is not None
    return answer.swap.version if answer.ok else answer.message


def test_no_weights_get_a_default_version_that_others_had() -> None:
    bench = SwapBench()
    given = ["", "7", "", "7", "", "a", "", "a", ""]
    versions = ["1", "7", "8", "7", "9", "a", "10", "a", "11"]
    assert [swap(bench, version) for version in given] == versions


@pytest.mark.parametrize("digits", [15, MAX_VERSION_BYTES])
def test_default_versions_follow_a_number_of_any_length(digits: int) -> None:
    bench, number = SwapBench(), 10**digits - 1
    versions = [str(number), str(number + 1), str(number + 2)]
    assert [swap(bench, version) for version in (versions[0], "", "")] == versions


def test_a_swap_to_the_version_that_serves_is_refused() -> None:
    bench = SwapBench()
    assert swap(bench, "a") == "a"
    assert "version a " in swap(bench, "a")
    bench.say(SwapWeights(50, "/new", version="b"))
    bench.engine.tick()
    bench.control.weights.version = WeightVersion(5, "b")  # An update has taken it.
    bench.stage("")
    for _ in range(2):
        bench.engine.tick()
    assert (bench.answers[-1].call, bench.answers[-1].ok) == (50, False)
    assert bench.control.weights.is_complete
    assert bench.saved == [("/new", "a")]


@pytest.mark.parametrize(("num_requests", "words"), [(1, "1 request "), (2, "2 requests ")])
def test_a_swap_does_not_wait_for_requests_that_a_pause_holds(num_requests: int, words: str) -> None:
    bench = SwapBench()
    for number in range(1, num_requests + 1):
        bench.submit(number, 40)
    for _ in range(3):
        bench.engine.tick()
    bench.say(Pause(4, "keep"), SwapWeights(5, "/new"), SwapWeights(6, "/new", activate=False))
    for _ in range(3):
        bench.engine.tick()
    refused = next(answer for answer in bench.answers if answer.call == 5)
    assert not refused.ok and words in refused.message and "paused" in refused.message
    assert bench.stager.paths == ["/new"], "staging needs no end of requests"
    bench.stage("")
    bench.say(SwapWeights(7, "/new", "restart"))
    for _ in range(3):
        bench.engine.tick()
    assert bench.answers[-1].ok and bench.answers[-1].call == 7
    bench.say(SwapWeights(8, "/new"), Resume(9))
    bench.stage("")
    bench.finish()
    assert next(answer for answer in bench.answers if answer.call == 8).ok is False, "it came before the resume"


def test_a_swap_waits_for_requests_that_a_pause_lets_end() -> None:
    bench = SwapBench()
    bench.submit(1, 6)
    for _ in range(3):
        bench.engine.tick()
    bench.say(Pause(4, "wait"), SwapWeights(5, "/new"))
    bench.stage("")
    for _ in range(20):
        bench.engine.tick()
    assert next(answer for answer in bench.answers if answer.call == 5).ok


def test_another_path_replaces_what_is_staged() -> None:
    bench = SwapBench()
    bench.say(SwapWeights(5, "/new", activate=False))
    bench.stage("")
    bench.say(SwapWeights(6, "/other"))
    bench.stage("")
    for _ in range(2):
        bench.engine.tick()
    assert (bench.stager.paths, bench.active_path) == (["/new", "/other"], "/other")


@pytest.mark.parametrize("state", ["staging", "staged", "draining"])
def test_a_swap_is_cancelled_in_any_state(state: str) -> None:
    bench = SwapBench()
    bench.submit(1, 40)
    bench.say(SwapWeights(5, "/new", activate=state != "staged"))
    bench.engine.tick()
    if state != "staging":
        bench.stage("")
    assert bench.swaps.facts.state == state
    bench.say(CancelSwap(6))
    for _ in range(2):
        bench.engine.tick()
    assert bench.swaps.facts.state == "idle"
    assert bench.stager.num_released
    answers = {answer.call: answer.ok for answer in bench.answers}
    assert answers == {5: state == "staged", 6: True}
    bench.finish()
    assert bench.mailbox.received[CLIENT, 1] == reference([3, 4, 5], 40, frozenset())
    bench.say(CancelSwap(7))
    bench.engine.tick()
    assert not bench.answers[-1].ok


def test_a_swap_is_cancelled_at_the_end_of_its_grace() -> None:
    bench = SwapBench()
    bench.submit(1, 50)
    bench.say(SwapWeights(5, "/new", grace=3.0))
    bench.stage("")
    bench.clock.now += 5
    for _ in range(2):
        bench.engine.tick()
    assert [(answer.call, answer.ok) for answer in bench.answers] == [(5, False)]
    assert bench.swaps.facts.state == "idle"
    bench.finish()


def test_weights_that_cannot_be_loaded_leave_the_old_ones(caplog: pytest.LogCaptureFixture) -> None:
    bench = SwapBench()
    bench.problem = "the disk is gone"
    bench.submit(1, 10)
    bench.say(SwapWeights(5, "/new", "restart"))
    bench.stage("")
    bench.finish()
    assert [(answer.ok, answer.message) for answer in bench.answers] == [(False, "the disk is gone")]
    assert bench.mailbox.received[CLIENT, 1] == reference([3, 4, 5], 10, frozenset())
    assert (bench.active_path, bench.saved) == ("/base", [])
    assert "the disk is gone" in caplog.text


def test_a_second_swap_is_refused_while_one_is_in_progress() -> None:
    bench = SwapBench()
    bench.say(SwapWeights(5, "/new"), SwapWeights(6, "/other"))
    bench.engine.tick()
    (answer,) = bench.answers
    assert (answer.call, answer.ok) == (6, False) and "/new" in answer.message


@pytest.mark.parametrize(
    "command",
    [
        SwapWeights(5, "/new", "never"),  # type: ignore[arg-type]
        SwapWeights(5, "/new", grace=-1.0),
        SwapWeights(5, "/new", grace=float("nan")),
        SwapWeights(5, "/new", version="x" * 300),
    ],
)
def test_malformed_swaps_are_refused(command: SwapWeights) -> None:
    bench = SwapBench()
    bench.say(command)
    bench.engine.tick()
    assert [answer.ok for answer in bench.answers] == [False]
    assert not bench.stager.paths


def test_an_engine_without_updates_refuses_swaps() -> None:
    bench = Bench(2)
    bench.say(SwapWeights(5, "/new"))
    bench.engine.tick()
    answer = bench.mailbox.replies[-1][1]
    assert isinstance(answer, Answer) and not answer.ok
