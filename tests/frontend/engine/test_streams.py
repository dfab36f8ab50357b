"""Streams merge tokens while their consumer lags, and end once."""

import asyncio

from tandem.frontend.engine.streams import ReadySet, Terminal, TokenStream
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished, TokenLogprobs

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
