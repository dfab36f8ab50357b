"""Order of the loop's calls, and its behavior when something fails."""

from typing import Any

import pytest

from tandem.engine_core.engine import MAX_FINAL_FLUSHES
from tandem.engine_core.errors import FatalError
from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Abort, EndSession, Goodbye, Hello, Inspect, SetPolicy, Submit
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Answer, Failure, Finished, Inspection, Ready
from tandem.protocol.params import SamplingParams
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.constraint import FakeConstraint
from tests.fakes.model import reference
from tests.support.recorded_engine import CLIENT, EPOCH, Bench


class TestOrder:
    def test_depth_one_keeps_one_step_in_flight(self) -> None:
        bench = Bench(1)
        bench.submit(1, 3)
        assert [bench.tick_calls() for _ in range(5)] == [
            ["launch 1", "sample 1"],
            ["collect 1", "launch 2", "sample 2"],
            ["collect 2", "launch 3", "sample 3"],
            ["collect 3"],
            [],
        ]

    def test_depth_two_keeps_two_steps_in_flight(self) -> None:
        """In steady decode a step is launched while another runs, after the one before that was collected."""
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

    def test_depth_two_samples_constrained_steps_one_tick_later(self) -> None:
        """The mask needs the tokens of the step before: sampling waits for its commit, the launch does not."""
        bench = Bench(2)
        bench.submit(1, 4, "parity")
        assert [bench.tick_calls() for _ in range(6)] == [
            ["launch 1"],
            ["stage 2", "sample 1", "launch 2"],
            ["collect 1", "stage 3", "sample 2", "launch 3"],
            ["collect 2", "stage 4", "sample 3", "launch 4"],
            ["collect 3", "sample 4", "collect 4"],
            [],
        ]

    def test_depth_one_samples_constrained_steps_one_tick_later(self) -> None:
        bench = Bench(1)
        bench.submit(1, 2, "parity")
        assert [bench.tick_calls() for _ in range(4)] == [
            ["launch 1"],
            ["sample 1", "collect 1", "launch 2"],
            ["sample 2", "collect 2"],
            [],
        ]

    def test_constrained_row_delays_only_its_own_steps(self) -> None:
        bench = Bench(2)
        bench.submit(1, 8)
        bench.submit(2, 1, "parity")
        assert bench.tick_calls() == ["launch 1"]
        calls = bench.tick_calls()
        assert calls == ["stage 2", "sample 1", "launch 2", "sample 2"], "step 2 has no constrained row"
        assert bench.tick_calls() == ["collect 1", "launch 3", "sample 3"]

    @pytest.mark.parametrize("depth", [1, 2])
    def test_idle_engine_does_not_touch_the_device(self, depth: int) -> None:
        bench = Bench(depth)
        assert not bench.engine.tick()
        assert bench.runtime.calls == []

    @pytest.mark.parametrize("depth", [1, 2])
    def test_loop_does_not_sleep_on_work_that_became_possible(self, depth: int) -> None:
        """The commit that empties the pipeline may free the row that the next request waits for."""
        bench = Bench(depth, rows=1)
        bench.submit(1, 3)
        bench.submit(2, 3)
        while not bench.mailbox.outcomes.get((CLIENT, 2)):
            busy = bench.engine.tick()
            assert busy or not bench.scheduler.waiting, "asleep beside a request that could run"


class TestRun:
    def run(self, bench: Bench, ticks: int) -> None:
        """Run the loop for this many drains, then stop it."""
        left = [ticks]

        def on_drain() -> None:
            left[0] -= 1
            bench.engine.stopping = left[0] <= 0

        bench.mailbox.on_drain = on_drain
        bench.engine.run()

    @pytest.mark.parametrize("depth", [1, 2])
    def test_stopping_ends_every_open_request_once(self, depth: int) -> None:
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
    def test_device_error_is_fatal_and_reported_once(self, place: str, depth: int) -> None:
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

    def test_unsendable_output_is_retried_then_given_up(self, caplog: pytest.LogCaptureFixture) -> None:
        bench = Bench(2)
        bench.mailbox.stuck = True
        waits: list[float] = []
        bench.mailbox.wait = waits.append  # type: ignore[method-assign]
        bench.engine.stopping = True
        bench.engine.run()
        assert len(waits) == MAX_FINAL_FLUSHES
        assert [record.levelname for record in caplog.records].count("ERROR") == 1

    def test_requests_that_were_not_taken_yet_end_as_well(self) -> None:
        bench = Bench(2)
        bench.submit(1, 9)
        bench.engine.tick()
        bench.submit(2, 9)
        bench.say(Abort([1]))
        bench.submit(3, 9, client=b"stranger")
        bench.engine.stopping = True
        bench.engine.run()
        for number in (1, 2):
            outcome = bench.outcome(number)
            assert isinstance(outcome, Failure) and outcome.code is ErrorCode.SHUTTING_DOWN
        assert (b"stranger", 3) not in bench.mailbox.outcomes, "it has not said Hello"
        assert bench.at_rest()

    def test_commands_that_arrive_at_the_end_do_not_cut_its_waits_short(self) -> None:
        """A socket with an unread command would end every wait at once, and with them the time to read the output."""
        bench = Bench(2)
        bench.mailbox.stuck = True
        unread: list[int] = []

        def on_wait() -> None:
            unread.append(len(bench.mailbox.inbox))
            bench.say(Abort([1]))

        bench.mailbox.on_wait = on_wait
        bench.engine.stopping = True
        bench.engine.run()
        assert unread == [0] * MAX_FINAL_FLUSHES

    def test_idle_loop_with_a_backlog_sleeps_briefly(self) -> None:
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
        flushes: list[int] = []
        bench.mailbox.on_flush = lambda: flushes.append(len(bench.mailbox.outcomes))
        bench.engine.tick()
        assert flushes == [1], "a refusal does not wait for somebody's next token"
        assert [type(event) for _, event in bench.mailbox.replies] == [Ready]
        assert isinstance(bench.outcome(5), Failure)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_vanished_frontend_has_its_requests_aborted(self, depth: int) -> None:
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
    def test_abort_or_goodbye_in_flight_makes_zombies(self, command: Any) -> None:
        bench = Bench(2)
        bench.submit(1, 30)
        for _ in range(2):
            bench.engine.tick()
        bench.say(command)
        bench.finish()
        assert bench.outcome(1) == Finished(1, FinishReason.ABORT)
        assert bench.stats.zombie_rows == 2
        assert bench.at_rest()


class TestGrammars:
    @pytest.mark.parametrize("depth", [1, 2])
    def test_other_requests_run_while_a_grammar_compiles(self, depth: int) -> None:
        bench = Bench(depth, rows=1)
        bench.compiler.delay = lambda: 12
        bench.submit(1, 3, "parity")
        bench.submit(2, 3)
        bench.submit(3, 3)
        bench.finish()
        assert list(bench.mailbox.outcomes) == [(CLIENT, 2), (CLIENT, 3), (CLIENT, 1)]
        assert bench.mailbox.received[CLIENT, 1] == reference([3, 4, 5], 3, frozenset(), 0, FakeConstraint("parity"))
        assert bench.stats.requests_constrained == 1

    def test_compiled_grammar_runs_in_the_same_tick(self) -> None:
        bench = Bench(2)
        bench.submit(1, 3, "parity")
        assert bench.tick_calls() == ["launch 1"]

    def test_failed_compilation_is_reported_at_once(self) -> None:
        bench = Bench(2)
        bench.submit(1, 3, "bad")
        assert not bench.engine.tick()
        assert bench.outcome(1) == Failure(1, ErrorCode.INVALID_GRAMMAR, "it is bad")
        assert bench.stats.requests_failed == {"invalid_grammar": 1}

    @pytest.mark.parametrize("leave", ["abort", "goodbye", "vanish", "stop"])
    def test_leaving_during_compilation_cancels_it(self, leave: str) -> None:
        bench = Bench(2)
        bench.compiler.delay = lambda: 1000
        for request_id in (1, 2):
            bench.submit(request_id, 3, "parity")
        bench.submit(3, 30)
        bench.engine.tick()
        assert bench.stats.waiting == 2
        assert len(bench.compiler.jobs) == 2
        if leave == "stop":
            bench.engine.stopping = True
            bench.engine.run()
            assert bench.compiler.closed
        elif leave == "vanish":
            bench.mailbox.gone.add(CLIENT)
        else:
            bench.say(Abort([1, 2, 3]) if leave == "abort" else Goodbye())
        while leave != "stop" and bench.scheduler.num_open:
            bench.engine.tick()
        while leave != "stop" and bench.engine.tick():
            pass
        assert bench.compiler.jobs == {}
        assert bench.at_rest()
        assert all(len(outcomes) == 1 for outcomes in bench.mailbox.outcomes.values())
        assert len(bench.mailbox.outcomes) == 3

    @pytest.mark.parametrize("depth", [1, 2])
    def test_request_without_a_step_frees_its_row_in_the_same_tick(self, depth: int) -> None:
        """Their whole output is forced, so they end when they are admitted."""
        bench = Bench(depth, rows=1)
        for request_id in range(1, 5):
            bench.submit(request_id, 2, "runs 5")
        bench.submit(5, 1)
        assert bench.tick_calls() == ["launch 1", "sample 1"]
        for request_id in range(1, 5):
            assert bench.mailbox.received[CLIENT, request_id] == [2, 9]
            assert bench.outcome(request_id) == Finished(request_id, FinishReason.LENGTH)
        assert bench.stats.generation_tokens == 8

    @pytest.mark.parametrize("depth", [1, 2])
    def test_grammar_error_leaves_other_requests_unharmed(self, depth: int) -> None:
        bench = Bench(depth)
        bench.submit(1, 9, "dies 4")
        bench.submit(2, 9, "parity")
        bench.submit(3, 9)
        bench.finish()
        outcome = bench.outcome(1)
        assert isinstance(outcome, Failure)
        assert outcome.code is ErrorCode.GRAMMAR_FAILED
        assert "after 4 tokens" in outcome.message
        assert len(bench.mailbox.received[CLIENT, 1]) == 4
        for request_id, constraint in ((2, FakeConstraint("parity")), (3, None)):
            assert bench.mailbox.received[CLIENT, request_id] == reference([3, 4, 5], 9, frozenset(), 0, constraint)
        assert bench.at_rest()


def test_stats_count_requests_tokens_and_steps() -> None:
    bench = Bench(2, rows=2)
    for request_id, max_tokens in ((1, 4), (2, 2), (3, 3)):
        bench.submit(request_id, max_tokens)
    bench.say(Submit(4, b"", SamplingParams(1)))
    bench.engine.tick()
    stats = bench.stats
    assert (stats.running, stats.waiting, stats.pages_used) == (2, 1, 2)
    bench.clock.advance(2.0)
    bench.engine.tick()
    assert (stats.waiting, stats.oldest_wait) == (1, 2.0)
    bench.finish()
    bench.engine.tick()
    assert (stats.running, stats.waiting, stats.pages_used, stats.steps_in_flight) == (0, 0, 0, 0)
    assert stats.oldest_wait == 0.0
    assert stats.requests_accepted == 3
    assert stats.requests_finished == {"stop": 0, "length": 3, "abort": 0, "error": 0}
    assert stats.requests_failed == {"invalid_value": 1}
    assert (stats.prompt_tokens, stats.generation_tokens, stats.zombie_rows) == (9, 9, 0)
    assert stats.steps_launched == stats.steps_committed == sum(stats.step_rows.counts)
    assert sum(stats.queue_time.counts) == 3
    assert stats.queue_time.total == 2.0
    assert stats.step_rows.total == 9.0


def test_preempted_request_is_counted_once() -> None:
    bench = Bench(1)
    bench.say(Submit(1, pack_ids(range(10, 20)), SamplingParams(6, ignore_eos=True)))
    for _ in range(3):
        bench.engine.tick()
    (seq,) = bench.scheduler.running.values()
    bench.scheduler.preempt(seq)
    bench.finish()
    bench.engine.tick()
    stats = bench.stats
    assert (stats.prompt_tokens, stats.generation_tokens, stats.preemptions) == (10, 6, 1)
    assert sum(stats.queue_time.counts) == 1
    assert (stats.prefix_queries, stats.prefix_hits) == (10, 0), "what it finds of its own is no hit"
    assert bench.mailbox.cached == {(CLIENT, 1): 0}


def test_commands_are_answered_while_nothing_runs() -> None:
    bench = Bench(2)
    bench.say(SetPolicy(1, "decode_first"), Inspect(2), EndSession(3, "x"))
    bench.engine.tick()
    answers = [event for _, event in bench.mailbox.replies[1:]]
    assert [type(event) for event in answers] == [Answer, Inspection, Answer]
    assert isinstance(answers[1], Inspection)
    assert answers[1].policy == "decode_first"
