"""Streams merge tokens while their consumer lags, and end once."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tandem.frontend.engine.streams import DraftCounts, ReadySet, Terminal, TokenStream
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished, TokenLogprobs
from tests.support.virtual_loop import VirtualLoop

Update = tuple[list[int], Terminal | None, list[TokenLogprobs]]

END = Finished(1, FinishReason.LENGTH)


def stream_of(ready_set: ReadySet) -> TokenStream:
    return TokenStream(1, 0, ready_set)


async def collect(ready_set: ReadySet) -> list[Update]:
    """Take the updates of one stream until its end."""
    seen: list[Update] = []
    while not seen or seen[-1][1] is None:
        seen += [stream.take() for stream in await ready_set.wait()]
    return seen


def test_a_lagging_consumer_gets_one_update() -> None:
    async def run() -> list[Update]:
        ready_set = ReadySet()
        stream = stream_of(ready_set)
        for token in range(1000):
            stream.put([token])
        stream.end(END)
        return await collect(ready_set)

    ((tokens, terminal, _),) = asyncio.run(run())
    assert tokens == list(range(1000))
    assert terminal is END


def test_a_waiting_consumer_is_woken_once_per_turn() -> None:
    async def run() -> list[Update]:
        ready_set = ReadySet()
        stream = stream_of(ready_set)
        reading = asyncio.create_task(collect(ready_set))
        for token in range(3):
            await asyncio.sleep(0)
            stream.put([token])
            stream.put([token + 10])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        stream.end(END)
        return await reading

    updates = asyncio.run(run())
    assert [tokens for tokens, _, _ in updates] == [[0, 10], [1, 11], [2, 12], []]
    assert [terminal for _, terminal, _ in updates] == [None, None, None, END]


def test_a_stream_ignores_what_follows_its_end() -> None:
    async def run() -> list[Update]:
        ready_set = ReadySet()
        stream = stream_of(ready_set)
        stream.end(Failure(1, ErrorCode.ENGINE_FAILED, "first"))
        stream.end(END)
        stream.put([1])
        return await collect(ready_set)

    ((tokens, terminal, _),) = asyncio.run(run())
    assert isinstance(terminal, Failure)
    assert (terminal.message, tokens) == ("first", [])


def test_an_empty_put_does_not_wake_the_consumer() -> None:
    ready_set = ReadySet()
    stream = TokenStream(1, 0, ready_set)
    stream.put([])
    assert ready_set._ready == []


def test_a_ready_set_returns_all_ready_streams_at_once() -> None:
    async def run() -> list[list[int]]:
        ready_set = ReadySet()
        streams = [TokenStream(number, number, ready_set) for number in range(5)]
        waiting = asyncio.create_task(ready_set.wait())
        await asyncio.sleep(0)
        for stream in streams[1:4]:
            stream.put([stream.request_id])
            stream.put([9])
        return [stream.take()[0] for stream in await waiting]

    assert asyncio.run(run()) == [[1, 9], [2, 9], [3, 9]]


def test_a_cancelled_wait_loses_no_update() -> None:
    async def run() -> int:
        ready_set = ReadySet()
        stream = TokenStream(1, 0, ready_set)
        waiting = asyncio.create_task(ready_set.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        stream.put([1])
        return len(await ready_set.wait())

    assert asyncio.run(run()) == 1


def run_counted(scenario: Coroutine[Any, Any, None]) -> int:
    """Run a scenario in virtual time; return how many timers it set, all of which have rung or were cancelled."""
    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(scenario)
        count = len(loop.timers)
        assert all(timer.cancelled() or timer.when() <= loop.time() for timer in loop.timers)
    return count


async def end_wait_in_time(
    ready_set: ReadySet, stream: TokenStream, limit: float, token: int = 1, after: float = 0.0
) -> None:
    """Wait for at most `limit` seconds, and give the stream a token `after` seconds, before the limit."""
    waiting = asyncio.create_task(ready_set.wait(limit))
    await asyncio.sleep(after)
    stream.put([token])
    assert await waiting == [stream]


def test_a_wait_beyond_its_limit_returns_no_stream() -> None:
    async def scenario() -> None:
        ready_set = ReadySet()
        for _ in range(3):
            assert await ready_set.wait(0.01) == []

    assert run_counted(scenario()) == 3


def test_waits_that_end_in_time_share_one_timer() -> None:
    async def scenario() -> None:
        ready_set = ReadySet()
        stream = stream_of(ready_set)
        for token in range(100):
            await end_wait_in_time(ready_set, stream, 60.0, token)
            assert stream.take()[0] == [token]
        ready_set.close()

    assert run_counted(scenario()) == 1


def test_a_timer_that_rings_early_moves_to_the_deadline_of_the_present_wait() -> None:
    async def scenario() -> None:
        ready_set = ReadySet()
        stream = stream_of(ready_set)
        await end_wait_in_time(ready_set, stream, 0.05, after=0.02)
        stream.take()
        assert await ready_set.wait(0.05) == []
        assert asyncio.get_running_loop().time() == pytest.approx(0.07)

    assert run_counted(scenario()) == 3  # The first wait's, the test's own sleep, and the second wait's.


def test_a_shorter_limit_does_not_wait_for_the_timer_of_a_longer_one() -> None:
    async def scenario() -> None:
        ready_set = ReadySet()
        stream = stream_of(ready_set)
        await end_wait_in_time(ready_set, stream, 3600.0)
        assert await ready_set.wait(0.01) == []
        assert asyncio.get_running_loop().time() == pytest.approx(0.01)

    assert run_counted(scenario()) == 2


def test_a_wait_without_limit_outlasts_the_timer_of_one_before() -> None:
    async def scenario() -> None:
        ready_set = ReadySet()
        stream = stream_of(ready_set)
        await end_wait_in_time(ready_set, stream, 0.02)
        stream.take()
        unlimited = asyncio.create_task(ready_set.wait())
        await asyncio.sleep(0.05)
        assert not unlimited.done()
        stream.put([2])
        assert await unlimited == [stream]

    assert run_counted(scenario()) == 2  # The first wait's, and the test's own sleep.


def test_a_closed_set_keeps_no_timer() -> None:
    async def scenario() -> None:
        ready_set = ReadySet()
        await end_wait_in_time(ready_set, stream_of(ready_set), 3600.0)
        ready_set.close()
        ready_set.close()

    assert run_counted(scenario()) == 1


def test_a_listener_is_called_once_a_turn_and_again_for_an_end() -> None:
    async def run() -> list[tuple[int, bool]]:
        calls: list[tuple[int, bool]] = []
        ready_set = ReadySet()
        streams = [TokenStream(number, number, ready_set) for number in range(2)]
        streams[0].put([1])
        ready_set.listen(lambda: calls.append((len(ready_set), ready_set.has_ended_stream)))
        streams[1].put([2])
        await asyncio.sleep(0)
        streams[0].put([3])  # not announced: the set still holds both
        await asyncio.sleep(0)
        streams[0].end(END)
        await asyncio.sleep(0)
        assert [stream.take()[0] for stream in ready_set.take()] == [[1, 3], [2]]
        ready_set.close()
        streams[1].put([4])
        await asyncio.sleep(0)
        return calls

    assert asyncio.run(run()) == [(2, False), (2, True)]


@pytest.mark.parametrize(
    ("num_tokens", "accepted", "predicted"),
    [(12, 8, 5), (11, 8, 5), (10, 7, 5), (8, 5, 5), (7, 5, 5), (6, 4, 4), (3, 1, 1), (2, 0, 0), (0, 0, 0)],
)
def test_accepted_drafts_count_as_far_as_their_tokens_are_used(num_tokens: int, accepted: int, predicted: int) -> None:
    """Two tokens without drafts, then runs of six and four tokens; the last of each is no draft."""
    stream = stream_of(ReadySet())
    stream.put([1])
    stream.put_drafts(3, 0, False)
    stream.put([1])
    stream.put_drafts(7, 5, True)
    stream.put([1] * 6)
    stream.put_drafts(3, 3, False)
    stream.put([1] * 4)
    assert stream.drafts(num_tokens) == DraftCounts(13, accepted, 7, predicted)


def test_drafts_of_steps_that_arrive_together_follow_one_another() -> None:
    """The second run ends the sequence at its second token."""
    stream = stream_of(ReadySet())
    stream.put_drafts(3, 3, True)
    stream.put_drafts(7, 7, False)
    stream.put([1] * 6)
    assert stream.drafts(6) == DraftCounts(10, 5, 3, 3)
