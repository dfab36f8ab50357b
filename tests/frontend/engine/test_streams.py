"""Deltas merge while the consumer lags, and there is one end."""

import asyncio

from tandem.frontend.engine.streams import ReadySet, StreamUpdate, TokenStream
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished

END = Finished(1, FinishReason.LENGTH)


def stream_of(ready_set: ReadySet) -> TokenStream:
    return TokenStream(1, 0, ready_set)


async def collect(ready_set: ReadySet) -> list[StreamUpdate]:
    """What a consumer of one stream sees until its end."""
    seen: list[StreamUpdate] = []
    while not seen or seen[-1].terminal is None:
        seen += [stream.take() for stream in await ready_set.wait()]
    return seen


def test_a_lagging_consumer_gets_one_delta() -> None:
    async def run() -> list[StreamUpdate]:
        ready_set = ReadySet()
        stream = stream_of(ready_set)
        for token in range(1000):
            stream.put([token])
        stream.finish(END)
        return await collect(ready_set)

    (delta,) = asyncio.run(run())
    assert delta.tokens == list(range(1000))
    assert delta.terminal is END


def test_a_waiting_consumer_is_woken_for_each_turn() -> None:
    async def run() -> list[StreamUpdate]:
        ready_set = ReadySet()
        stream = stream_of(ready_set)
        reading = asyncio.create_task(collect(ready_set))
        for token in range(3):
            await asyncio.sleep(0)
            stream.put([token])
            stream.put([token + 10])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        stream.finish(END)
        return await reading

    deltas = asyncio.run(run())
    assert [delta.tokens for delta in deltas] == [[0, 10], [1, 11], [2, 12], []]
    assert [delta.terminal for delta in deltas] == [None, None, None, END]


def test_nothing_follows_the_end() -> None:
    async def run() -> list[StreamUpdate]:
        ready_set = ReadySet()
        stream = stream_of(ready_set)
        stream.fail(Failure(1, ErrorCode.ENGINE_FAILED, "first"))
        stream.finish(END)
        stream.put([1])
        return await collect(ready_set)

    (delta,) = asyncio.run(run())
    assert isinstance(delta.terminal, Failure)
    assert (delta.terminal.message, delta.tokens) == ("first", [])


def test_an_empty_put_wakes_nobody() -> None:
    ready_set = ReadySet()
    stream = TokenStream(1, 0, ready_set)
    stream.put([])
    assert ready_set._ready == []


def test_streams_of_one_waker_come_together() -> None:
    async def run() -> list[list[int]]:
        ready_set = ReadySet()
        streams = [TokenStream(number, number, ready_set) for number in range(5)]
        waiting = asyncio.create_task(ready_set.wait())
        await asyncio.sleep(0)
        for stream in streams[1:4]:
            stream.put([stream.request_id])
            stream.put([9])
        return [stream.take().tokens for stream in await waiting]

    assert asyncio.run(run()) == [[1, 9], [2, 9], [3, 9]]


def test_a_cancelled_wait_loses_nothing() -> None:
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
