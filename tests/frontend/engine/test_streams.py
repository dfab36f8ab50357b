"""Deltas merge while the consumer lags, and there is one end."""

import asyncio

from tandem.frontend.engine.streams import Delta, TokenStream, Waker
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished

END = Finished(1, FinishReason.LENGTH)


def stream_of(waker: Waker) -> TokenStream:
    return TokenStream(1, 0, waker)


async def collect(waker: Waker) -> list[Delta]:
    """What a consumer of one stream sees until its end."""
    seen: list[Delta] = []
    while not seen or seen[-1].terminal is None:
        seen += [stream.take() for stream in await waker.wait()]
    return seen


def test_a_lagging_consumer_gets_one_delta() -> None:
    async def run() -> list[Delta]:
        waker = Waker()
        stream = stream_of(waker)
        for token in range(1000):
            stream.put([token])
        stream.finish(END)
        return await collect(waker)

    (delta,) = asyncio.run(run())
    assert delta.tokens == list(range(1000))
    assert delta.terminal is END


def test_a_waiting_consumer_is_woken_for_each_turn() -> None:
    async def run() -> list[Delta]:
        waker = Waker()
        stream = stream_of(waker)
        reading = asyncio.create_task(collect(waker))
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
    async def run() -> list[Delta]:
        waker = Waker()
        stream = stream_of(waker)
        stream.fail(Failure(1, ErrorCode.ENGINE_FAILED, "first"))
        stream.finish(END)
        stream.put([1])
        return await collect(waker)

    (delta,) = asyncio.run(run())
    assert isinstance(delta.terminal, Failure)
    assert (delta.terminal.message, delta.tokens) == ("first", [])


def test_an_empty_put_wakes_nobody() -> None:
    waker = Waker()
    stream = TokenStream(1, 0, waker)
    stream.put([])
    assert waker._ready == []


def test_streams_of_one_waker_come_together() -> None:
    async def run() -> list[list[int]]:
        waker = Waker()
        streams = [TokenStream(number, number, waker) for number in range(5)]
        waiting = asyncio.create_task(waker.wait())
        await asyncio.sleep(0)
        for stream in streams[1:4]:
            stream.put([stream.request_id])
            stream.put([9])
        return [stream.take().tokens for stream in await waiting]

    assert asyncio.run(run()) == [[1, 9], [2, 9], [3, 9]]


def test_a_cancelled_wait_loses_nothing() -> None:
    async def run() -> int:
        waker = Waker()
        stream = TokenStream(1, 0, waker)
        waiting = asyncio.create_task(waker.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        stream.put([1])
        return len(await waker.wait())

    assert asyncio.run(run()) == 1
