"""Matching of replies with calls, without an engine."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tandem.frontend.engine.calls import EngineCall, EngineCalls
from tandem.frontend.errors import ApiError, unavailable
from tandem.protocol.commands import PAUSE_MODES, EndSession, SetPolicy
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Answer, Heartbeat, Inspection, PauseFacts, Phase, SwapFacts, WeightFacts, WeightState
from tandem.protocol.stats import EngineStats
from tests.support.refusals import raises_api_error
from tests.support.virtual_loop import VirtualLoop

NO_PAUSE = PauseFacts(None, False, False)


def test_each_call_gets_its_own_reply() -> None:
    async def ask() -> None:
        sent: list[EngineCall] = []
        calls = EngineCalls(sent.append)
        ended = asyncio.create_task(calls.end_session("talk"))
        refused = asyncio.create_task(calls.set_policy("lottery"))
        switched = asyncio.create_task(calls.set_policy("fcfs"))
        inspected = asyncio.create_task(calls.inspect())
        while len(sent) < 4:
            await asyncio.sleep(0)
        first, second, third, fourth = (call.call for call in sent)
        assert sent[:2] == [EndSession(first, "talk"), SetPolicy(second, "lottery")]
        assert len({first, second, third, fourth}) == calls.num_open == 4
        picture = Inspection(fourth, "fcfs", EngineStats(), 1, 0, [], [])
        replies = (Answer(99, True), picture, Answer(third, True), Answer(second, False, "no"), Answer(second, True))
        for reply in (*replies, Answer(first, True)):
            calls.answer(reply)
        assert (await ended, await refused, await switched, await inspected) == (True, "no", "", picture)
        assert calls.num_open == 0

    asyncio.run(ask())


def test_a_call_without_a_reply_is_503() -> None:
    async def wait_in_vain() -> None:
        sent: list[EngineCall] = []
        calls = EngineCalls(sent.append, timeout=0.01)
        with pytest.raises(ApiError, match=r"\b0\.01\b") as caught:
            await calls.inspect()
        assert (caught.value.status, caught.value.code) == (503, ErrorCode.ENGINE_UNAVAILABLE)
        assert calls.num_open == 0
        calls.answer(Answer(sent[0].call, True))

    asyncio.run(wait_in_vain())


@pytest.mark.parametrize(
    "ask", [lambda calls: calls.load_adapter("a", "/a", False, "/"), lambda c: c.unload_adapter("a")]
)
def test_calls_of_adapters_have_a_time_of_their_own(ask: Callable[[EngineCalls], Awaitable[str]]) -> None:
    async def wait_in_vain() -> None:
        calls = EngineCalls(lambda _: None, timeout=1000.0, adapter_timeout=0.01)
        with pytest.raises(ApiError, match=r"\b0\.01\b") as caught:
            await ask(calls)
        assert (caught.value.status, calls.num_open) == (503, 0)

    asyncio.run(wait_in_vain())


@pytest.mark.parametrize(
    "ask",
    [
        lambda calls: calls.resume(),
        lambda calls: calls.pause("keep", False),
        lambda calls: calls.pause("abort", True),
        lambda calls: calls.reset_prefix_cache(),
        lambda calls: calls.load_adapter("a", "/a", False, "/"),
    ],
)
def test_time_during_which_the_weights_change_does_not_count(ask: Callable[[EngineCalls], Awaitable[object]]) -> None:
    """The engine carries a call out after the change, so it must not have failed by then."""

    async def wait(changes: bool) -> None:
        sent: list[EngineCall] = []
        calls = EngineCalls(sent.append, timeout=10.0, adapter_timeout=10.0)
        call = asyncio.ensure_future(ask(calls))
        for _ in range(20):
            await asyncio.sleep(1.0)
            if changes:
                calls.note_heartbeat(beat("changing", SwapFacts("idle", "", 0, "/old", "3")))
        if not changes:
            with pytest.raises(ApiError, match=r"\b10 s"):
                await call
            return
        await asyncio.sleep(9.0)
        calls.answer(Answer(sent[0].call, True))
        await call
        late = asyncio.ensure_future(ask(calls))
        with pytest.raises(ApiError, match=r"\b10 s"):
            await late

    for changes in (True, False):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(wait(changes))


def beat(state: WeightState, swap: SwapFacts, pause: PauseFacts | None = NO_PAUSE, sleeping: int = 0) -> Heartbeat:
    stats = EngineStats(sleeping=sleeping)
    return Heartbeat(1, Phase.READY, 100, "", 0, stats, None, WeightFacts("3", state), swap, pause)


def test_a_swap_is_inspected_by_heartbeats_while_the_engine_answers_nothing() -> None:
    async def inspect() -> None:
        sent: list[EngineCall] = []
        calls = EngineCalls(sent.append)
        before, after = (SwapFacts(state, "/new", 40, "/old", "3") for state in ("loading", "staged"))
        calls.note_heartbeat(beat("changing", before))
        first = asyncio.create_task(calls.inspect_swap())
        while not sent:
            await asyncio.sleep(0)
        calls.note_heartbeat(beat("changing", before))  # It may be older than the call.
        calls.note_heartbeat(beat("ready", after))
        second = asyncio.create_task(calls.inspect_swap())
        while len(sent) < 2:
            await asyncio.sleep(0)
        assert not first.done()
        calls.note_heartbeat(beat("changing", before))
        assert (await first).swap == before
        calls.answer(Answer(sent[1].call, True, swap=after))
        calls.note_heartbeat(beat("changing", before))
        assert (await second).swap == after
        calls.note_heartbeat(beat("changing", before))
        assert calls.num_open == 0

    asyncio.run(inspect())


def test_heartbeats_answer_every_read_while_the_weights_change() -> None:
    async def read() -> None:
        sent: list[EngineCall] = []
        calls = EngineCalls(sent.append)
        paused = asyncio.create_task(calls.inspect_pause())
        asleep = asyncio.create_task(calls.is_sleeping())
        scheduler = asyncio.create_task(calls.inspect())
        changed = asyncio.create_task(calls.set_policy("fcfs"))
        while len(sent) < 4:
            await asyncio.sleep(0)
        swap, pause = SwapFacts("idle", "", 0, "/old", "3"), PauseFacts("keep", False, True)
        for state in ("sleeping", "ready", "incomplete"):
            for _ in range(2):
                calls.note_heartbeat(beat(state, swap, pause))
        await asyncio.sleep(0)
        assert calls.num_open == 4, "the engine answers these itself"
        for _ in range(2):
            calls.note_heartbeat(beat("changing", swap, pause, sleeping=1))
        assert (await paused, await asleep) == (pause, True)
        with raises_api_error(503, ErrorCode.ENGINE_UNAVAILABLE):
            await scheduler
        assert not changed.done(), "a call that changes something waits for its reply"
        paused = asyncio.create_task(calls.inspect_pause())
        await asyncio.sleep(0)
        for _ in range(2):
            calls.note_heartbeat(beat("changing", swap, None))
        with raises_api_error(503, ErrorCode.ENGINE_UNAVAILABLE):
            await paused
        calls.answer(Answer(sent[3].call, True))
        assert (await changed, calls.num_open) == ("", 0)

    asyncio.run(read())


def test_a_call_that_cannot_be_sent_is_forgotten() -> None:
    def broken(_: EngineCall) -> None:
        raise unavailable("there is no engine")

    async def fail() -> None:
        calls = EngineCalls(broken)
        with raises_api_error(503, ErrorCode.ENGINE_UNAVAILABLE):
            await calls.end_session("talk")
        assert calls.num_open == 0

    asyncio.run(fail())


def test_engine_loss_fails_every_open_call() -> None:
    async def lose() -> None:
        sent: list[EngineCall] = []
        calls = EngineCalls(sent.append)
        asked = [asyncio.create_task(calls.end_session(name)) for name in "ab"]
        while len(sent) < 2:
            await asyncio.sleep(0)
        calls.fail_all(unavailable("the engine was restarted"))
        for task in asked:
            with pytest.raises(ApiError, match="restarted"):
                await task
        assert calls.num_open == 0

    asyncio.run(lose())


def test_pause_is_answered_with_the_reason_why_there_is_none() -> None:
    async def ask() -> None:
        sent: list[EngineCall] = []
        calls = EngineCalls(sent.append)
        refused, paused = (asyncio.create_task(calls.pause(mode, False)) for mode in PAUSE_MODES[:2])
        resumed = asyncio.create_task(calls.resume())
        while len(sent) < 3:
            await asyncio.sleep(0)
        calls.answer(Answer(sent[0].call, False, "it was resumed", 2))
        calls.answer(Answer(sent[1].call, True, pause_changes=3))
        assert not resumed.done()
        calls.answer(Answer(sent[2].call, True, pause_changes=4))
        assert "resumed" in await refused and await paused == ""
        await resumed

    asyncio.run(ask())
