"""The requests of `bench_tick`, and ticks of a real engine with them."""

from collections.abc import Iterator, Set
from time import perf_counter
from typing import Any, cast
from unittest.mock import patch

import pytest
import zmq
from msgspec import structs

from benchmarks import bench_tick
from benchmarks.bench_tick import GRAMMARS, LONGEST, VOCAB, Options, measure
from benchmarks.measuring.grammars import ENDLESS
from benchmarks.measuring.tick_requests import PROMPT, BetweenTicks, Requests, reach_steady_state
from tandem.engine_core.contracts import StepResult
from tandem.engine_core.engine import Engine
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.scheduler.commit import SchedulerUpdates
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tandem.engine_core.stats import STAGES, new_stats
from tandem.protocol.codec import decode_command, unpack_ids
from tandem.protocol.commands import RENEW_SECONDS, Command, Hello, Renew, Submit
from tests.fakes.clock import FakeClock
from tests.fakes.turning_engine import TurningEngine


def requests(rows: int, length: int, constrained: int = 100) -> Requests:
    return Requests(rows, LONGEST, length, constrained, "grammar", VOCAB)


def submits(received: list[Command]) -> list[Submit]:
    return [command for command in received if isinstance(command, Submit)]


class Ends:
    """Both ends of a connection."""

    def __init__(self) -> None:
        self.context: Any = zmq.Context()
        self.engine, self.frontend = self.context.socket(zmq.PAIR), self.context.socket(zmq.PAIR)
        self.engine.bind("inproc://ends")
        self.frontend.connect("inproc://ends")

    def received(self) -> list[Command]:
        """Take what the frontend has sent."""
        found: list[Command] = []
        while self.engine.poll(0):
            found.append(decode_command(self.engine.recv()))
        return found


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.context.destroy(linger=0)


class TestRequests:
    """Which requests there are."""

    @pytest.mark.parametrize(("constrained", "expected"), [(0, 0), (25, 50), (100, 200)])
    def test_a_share_follows_the_grammar(self, constrained: int, expected: int) -> None:
        made = [requests(4, 0, constrained).request(number, 9) for number in range(200)]
        assert sum(one.constraint == "grammar" for one in made) == expected
        assert {one.sampling.max_tokens for one in made} == {9}

    def test_prompts_begin_differently_and_stay_in_the_vocabulary(self) -> None:
        prompts = [unpack_ids(requests(4, 0).request(number, 9).prompt_ids) for number in range(100)]
        assert len({prompt[0] for prompt in prompts}) == 100
        assert 0 < min(map(len, prompts)) < max(map(len, prompts)) == PROMPT
        assert unpack_ids(requests(4, 0).request(VOCAB + 3, 9).prompt_ids)[0] == 3


class TestFrontend:
    """What the frontend sends between two ticks."""

    def test_requests_without_an_end_are_sent_once(self, ends: Ends) -> None:
        frontend = BetweenTicks(ends.frontend, new_stats(), requests(3, 0), FakeClock())
        frontend.begin(1)
        frontend.turn()
        hello, *others = ends.received()
        assert isinstance(hello, Hello) and hello.engine_epoch == 1
        assert [one.sampling.max_tokens for one in submits(others)] == [LONGEST] * 3

    def test_each_request_that_ends_is_followed_by_another(self, ends: Ends) -> None:
        stats = new_stats()
        frontend = BetweenTicks(ends.frontend, stats, requests(50, 20), FakeClock())
        frontend.begin(1)
        first = submits(ends.received())
        assert {1, 20} <= {one.sampling.max_tokens for one in first} <= set(range(1, 21))
        assert len(first) == 50
        stats.requests_finished |= {"length": 2, "error": 1}
        frontend.turn()
        frontend.turn()
        later = submits(ends.received())
        assert [(one.request_id, one.sampling.max_tokens) for one in later] == [(50, 20), (51, 20), (52, 20)]

    def test_it_reads_everything_and_renews_its_lease_in_time(self, ends: Ends) -> None:
        clock = FakeClock()
        frontend = BetweenTicks(ends.frontend, new_stats(), requests(1, 0), clock)
        frontend.begin(1)
        ends.received()
        for _ in range(3):
            ends.engine.send(b"output")
        frontend.turn()
        assert not ends.frontend.poll(0) and not ends.received()
        clock.advance(RENEW_SECONDS)
        frontend.turn()
        frontend.turn()
        assert ends.received() == [Renew()]


class TestSettle:
    """Ticks before the measurement."""

    @pytest.mark.parametrize("compiled_at", [(), (3,), (3, 9, 10)])
    def test_every_row_follows_what_was_compiled_last(self, ends: Ends, compiled_at: tuple[int, ...]) -> None:
        engine = TurningEngine(rows=4, ticks=8, compiled_at=compiled_at)
        frontend = BetweenTicks(ends.frontend, engine.stats, requests(4, 8), FakeClock())
        frontend.begin(1)
        reach_steady_state(cast("Engine", engine), frontend)
        assert 4 <= engine.ended_since_compilation <= 5
        assert engine.num_ticks > max(compiled_at, default=0)

    def test_all_rows_run_where_none_ends(self, ends: Ends) -> None:
        engine = TurningEngine(rows=4, ticks=8, compiled_at=(3,))
        reach_steady_state(
            cast("Engine", engine), BetweenTicks(ends.frontend, engine.stats, requests(4, 0), FakeClock())
        )
        assert engine.num_ticks == 4


class TestMeasure:
    """Runs of a real engine."""

    def options(self, grammar: str, length: int) -> Options:
        return Options(
            steps=40,
            cached_pages=0,
            constrained=100,
            length=length,
            grammar=GRAMMARS[grammar],
            tokenizer=DEFAULT_MODEL / "tokenizer.json",
            grammar_workers=0,
            clock=perf_counter,
        )

    @pytest.mark.parametrize("length", [0, 20])
    @pytest.mark.parametrize(("constrained", "adapt"), [(0, False), (50, False), (0, True)])
    def test_steps_verify_drafts_for_all_rows(self, length: int, constrained: int, adapt: bool) -> None:
        options = structs.replace(self.options("strings", length), drafts=3, constrained=constrained, adapt=adapt)
        commit, drafts = Scheduler.commit, list[int]()

        def counted(scheduler: Scheduler, plan: StepPlan, result: StepResult, *more: Set[int]) -> SchedulerUpdates:
            drafts.append(plan.num_drafts)
            return commit(scheduler, plan, result, *more)

        with patch.object(Scheduler, "commit", counted):
            assert measure(4, options)["rows"] > 1
        assert len(drafts) - drafts.count(0) > 20 and set(drafts) <= ({0, 1, 2, 3} if adapt else {0, 3})

    @pytest.mark.parametrize("grammar", ["anything", *ENDLESS])
    def test_requests_that_never_end_fill_every_step(self, grammar: str) -> None:
        found = measure(3, self.options(grammar, 0))
        assert list(found) == [*STAGES, "tick", "tick mean", "rows"]
        assert found["rows"] == 3 and min(found.values()) > 0

    @pytest.mark.parametrize("grammar", ENDLESS)
    def test_requests_that_end_make_room_for_others(self, grammar: str) -> None:
        found = measure(3, self.options(grammar, 5))
        assert 0 < found["rows"] <= 3 and found["tick mean"] > 0

    @pytest.mark.parametrize("length", ["-1", str(LONGEST + 1)])
    def test_a_wrong_length_is_refused(
        self, length: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("sys.argv", ["bench_tick", "--length", length])
        with pytest.raises(SystemExit):
            bench_tick.main()
        error = capsys.readouterr().err
        assert f"--length {length}: " in error and f" {LONGEST} tokens" in error
