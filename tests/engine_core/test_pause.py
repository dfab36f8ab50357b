"""Pause and resume of the loop: paused work, refusals, and unchanged outputs."""

import random

import pytest

from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import PAUSE_MODES, Abort, Goodbye, Hello, Inspect, Pause, PauseMode, Resume, Submit
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Answer, Failure, Finished, Inspection
from tandem.protocol.params import SamplingParams
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.model import reference
from tests.support.recorded_engine import CLIENT, EPOCH, Bench
from tests.support.tiny_llama import Shape, TinyEngine, random_model


def answers(bench: Bench) -> list[Answer]:
    return [event for _, event in bench.mailbox.replies if isinstance(event, Answer)]


def paused(depth: int, mode: PauseMode, *, refuse_new: bool = False) -> Bench:
    """Return an engine with a running request of 8 tokens and a waiting one, paused after two ticks."""
    bench = Bench(depth, rows=1)
    bench.submit(1, 8)
    bench.submit(2, 8)
    for _ in range(2):
        bench.engine.tick()
    bench.say(Pause(7, mode, refuse_new))
    for _ in range(30):
        bench.engine.tick()
    assert bench.engine.pipeline.in_flight == 0
    assert (answers(bench), bench.stats.paused) == ([Answer(7, True, "", 1)], 1)
    assert bench.mailbox.num_announced == 1
    return bench


@pytest.mark.parametrize("depth", [1, 2])
class TestModes:
    def test_keep_freezes_running_and_waiting_requests(self, depth: int) -> None:
        bench = paused(depth, "keep")
        assert bench.mailbox.outcomes == {}
        assert (bench.stats.running, bench.stats.waiting) == (1, 1)
        launched = bench.stats.steps_launched
        assert not bench.engine.tick(), "a paused loop sleeps"
        bench.say(Resume(8))
        bench.finish()
        assert answers(bench)[1:] == [Answer(8, True, "", 2)]
        assert bench.stats.steps_launched > launched
        for number in (1, 2):
            assert bench.mailbox.received[CLIENT, number] == reference([3, 4, 5], 8, frozenset())
        assert (bench.stats.paused, bench.mailbox.num_announced, bench.at_rest()) == (0, 2, True)

    def test_wait_lets_running_requests_finish_and_admits_no_others(self, depth: int) -> None:
        bench = paused(depth, "wait")
        assert bench.outcome(1) == Finished(1, FinishReason.LENGTH)
        assert (bench.stats.running, bench.stats.waiting) == (0, 1)
        bench.say(Resume(8))
        bench.finish()
        assert bench.outcome(2) == Finished(2, FinishReason.LENGTH)
        assert bench.at_rest()

    def test_a_pause_that_refuses_requests_is_announced_at_once(self, depth: int) -> None:
        bench = Bench(depth, rows=1)
        bench.submit(1, 8)
        bench.engine.tick()
        bench.say(Pause(7, "wait", True))
        bench.engine.tick()
        assert (bench.stats.paused, bench.mailbox.num_announced) == (0, 1)
        bench.finish()
        assert (bench.stats.paused, bench.mailbox.num_announced) == (1, 2)
        bench.say(Resume(8))
        bench.engine.tick()
        assert (bench.stats.paused, bench.mailbox.num_announced) == (0, 3)

    def test_wait_lets_all_sequences_of_a_request_finish(self, depth: int) -> None:
        bench = Bench(depth, rows=1)
        for number, group in ((1, 1), (2, 1), (3, 3)):
            bench.submit(number, 8, group=group)
        for _ in range(2):
            bench.engine.tick()
        bench.say(Pause(7, "wait"))
        for _ in range(40):
            bench.engine.tick()
        assert answers(bench) == [Answer(7, True, "", 1)]
        assert [bench.outcome(number) for number in (1, 2)] == [Finished(n, FinishReason.LENGTH) for n in (1, 2)]
        assert (bench.stats.running, bench.stats.waiting) == (0, 1)
        bench.say(Resume(8))
        bench.finish()
        assert bench.at_rest()

    def test_abort_ends_open_requests_with_the_reason(self, depth: int) -> None:
        bench = paused(depth, "abort")
        for number in (1, 2):
            outcome = bench.outcome(number)
            assert isinstance(outcome, Failure) and outcome.code is ErrorCode.ENGINE_PAUSED
            assert "mode abort" in outcome.message
        assert bench.at_rest()

    def test_requests_that_arrive_wait_for_the_resume(self, depth: int) -> None:
        for mode in PAUSE_MODES:
            bench = paused(depth, mode)
            bench.submit(3, 4)
            for _ in range(3):
                assert not bench.engine.tick()
            assert (CLIENT, 3) not in bench.mailbox.outcomes
            bench.say(Resume(8))
            bench.finish()
            assert bench.mailbox.received[CLIENT, 3] == reference([3, 4, 5], 4, frozenset())
            assert bench.at_rest()

    def test_requests_that_arrive_are_refused_if_asked(self, depth: int) -> None:
        bench = paused(depth, "keep", refuse_new=True)
        bench.submit(3, 4)
        bench.engine.tick()
        refusal = bench.outcome(3)
        assert isinstance(refusal, Failure) and refusal.code is ErrorCode.ENGINE_PAUSED
        assert bench.stats.requests_failed == {"engine_paused": 1}
        bench.say(Resume(8))
        bench.submit(4, 4)
        bench.finish()
        assert bench.outcome(4) == Finished(4, FinishReason.LENGTH)


def test_answer_to_a_pause_comes_after_the_last_step_in_flight() -> None:
    bench = Bench(2)
    bench.submit(1, 20)
    for _ in range(3):
        bench.engine.tick()
    assert bench.engine.pipeline.in_flight == 2
    bench.say(Pause(7, "keep"))
    seen = []
    for _ in range(3):
        bench.engine.tick()
        seen.append((bench.engine.pipeline.in_flight, len(answers(bench)), bench.stats.paused))
    assert seen[-1] == (0, 1, 1)
    assert all(number == flag == (in_flight == 0) for in_flight, number, flag in seen), seen


def test_constrained_step_that_waits_for_its_mask_is_sampled_before_the_pause() -> None:
    bench = Bench(2)
    bench.submit(1, 6, "parity")
    bench.engine.tick()
    assert bench.engine.pipeline.unsampled() is not None
    bench.say(Pause(7, "keep"))
    for _ in range(3):
        bench.engine.tick()
    assert (bench.engine.pipeline.in_flight, answers(bench)) == (0, [Answer(7, True, "", 1)])
    bench.say(Resume(8))
    bench.finish()
    assert bench.at_rest()


def test_resume_before_the_pause_is_complete_answers_both() -> None:
    bench = Bench(2)
    bench.submit(1, 8)
    bench.engine.tick()
    bench.say(Pause(7, "wait"), Resume(8))
    bench.finish()
    resume, pause = answers(bench)
    assert resume == Answer(8, True)
    assert (pause.call, pause.ok) == (7, False) and "resumed" in pause.message
    assert bench.mailbox.received[CLIENT, 1] == reference([3, 4, 5], 8, frozenset())


def test_change_of_a_pause_that_leaves_the_engine_paused_is_no_change() -> None:
    bench = paused(2, "keep")
    bench.say(Resume(8), Pause(9, "keep"))
    bench.engine.tick()
    assert answers(bench)[1:] == [Answer(8, True, "", 1), Answer(9, True, "", 1)]
    assert (bench.stats.pause_changes, bench.mailbox.num_announced) == (1, 1)


def test_resume_without_a_pause_is_answered() -> None:
    bench = Bench(2)
    bench.say(Resume(8))
    bench.finish()
    assert answers(bench) == [Answer(8, True)]


@pytest.mark.parametrize("command", [Abort([1, 2]), Goodbye()], ids=["abort", "goodbye"])
def test_requests_end_and_give_back_their_rows_during_a_pause(command: Abort | Goodbye) -> None:
    bench = paused(2, "keep")
    bench.say(command)
    bench.engine.tick()
    assert bench.outcome(1) == Finished(1, FinishReason.ABORT)
    assert bench.at_rest()
    bench.engine.tick()
    assert (bench.stats.running, bench.stats.waiting, bench.stats.paused) == (0, 0, 1)


def test_pause_outlives_the_frontend_that_asked_for_it() -> None:
    bench = paused(2, "keep")
    bench.say(Hello(PROTOCOL_VERSION, EPOCH, "other"), client=b"other")
    bench.submit(1, 4, client=b"other")
    bench.say(Goodbye())
    for _ in range(3):
        assert not bench.engine.tick()
    bench.say(Resume(1), client=b"other")
    bench.finish()
    assert bench.outcome(1, b"other") == Finished(1, FinishReason.LENGTH)


def test_inspection_shows_the_pause() -> None:
    bench = paused(2, "keep", refuse_new=True)
    bench.say(Inspect(9))
    bench.engine.tick()
    found = bench.mailbox.replies[-1][1]
    assert isinstance(found, Inspection)
    assert (found.pause_mode, found.refuses_new, found.stats.paused) == ("keep", True, 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_of_a_real_model_are_those_of_an_engine_that_never_paused(depth: int) -> None:
    """Greedy and seeded rows, with pauses at random ticks and requests that arrive during them."""
    model = random_model()
    prompts = [[5, 9, 2, 7], [11, 3], [6] * 9, [4, 8, 15, 16, 23, 42], [7, 7, 9]]
    params = [
        SamplingParams(14, temperature=0.0, ignore_eos=True),
        SamplingParams(12, temperature=0.9, seed=7, ignore_eos=True),
        SamplingParams(10, temperature=1.0, top_p=0.8, seed=1, ignore_eos=True),
        SamplingParams(16, temperature=0.0, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(12, temperature=0.7, seed=99, ignore_eos=True),
    ]
    shape = Shape(depth=depth, max_rows=3, step_tokens=8, chunk=4)
    expected = TinyEngine(model, shape).generate(prompts, params)
    for seed in range(3):
        rng = random.Random(seed)
        driven = TinyEngine(model, shape)
        inbox = driven.mailbox.inbox
        arrivals = [Submit(number, pack_ids(prompts[number]), params[number]) for number in range(len(prompts))]
        pauses = 0
        while len(driven.mailbox.outcomes) < len(prompts):
            if arrivals and rng.random() < 0.3:
                inbox.append((b"c", arrivals.pop(0)))
            if rng.random() < 0.3:
                inbox.append((b"c", Pause(pauses, "keep") if driven.control.pause.mode is None else Resume(pauses)))
                pauses += 1
            driven.engine.tick()
        assert pauses > 4
        assert [driven.mailbox.received[b"c", number] for number in range(len(prompts))] == expected
