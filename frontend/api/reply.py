"""The ASGI response of a generation: streamed or whole, in whatever shape. It notices at once when the client goes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.frontend.api.body import SMALL_BODY, BodyShare, read_body
from tandem.frontend.api.formatter import Formatter
from tandem.frontend.api.service import Service
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.choice import Piece
from tandem.frontend.generation.generation import Generation

_Parsed = TypeVar("_Parsed")


async def parse_body(
    request: Request, share: BodyShare, service: Service, parse: Callable[[bytes], _Parsed]
) -> _Parsed:
    """Reads and parses; a large body in a thread, for a small one that would cost more than it saves."""
    body = await read_body(request, service.config.max_body, share)
    if len(body) <= SMALL_BODY:
        return parse(body)
    return await service.parser.run(parse, body)


def encoded(value: object) -> Response:
    """200 with this value as JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


MANY_SCORED = 1024
"""A whole reply with the log-probabilities of more tokens is encoded in a thread."""

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that buffer would hold tokens back.
    (b"x-accel-buffering", b"no"),
]


async def _disconnected(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Reply(Response):
    """Runs a generation and answers with it.

    Until the first event of the engine nothing is sent, so that a refusal is an HTTP status (as ApiError, for the
    exception handlers of the app); afterwards an error is an event of the stream.
    """

    background = None

    def __init__(self, generation: Generation, formatter: Formatter, service: Service) -> None:
        self.status_code = 200
        self._generation = generation
        self._formatter = formatter
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        answer = self._stream(send) if generation.admitted.options.stream else self._whole(send)
        reason = "cancelled"
        tasks = [asyncio.create_task(answer), asyncio.create_task(_disconnected(receive))]
        self._service.replies += 1
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                reason = "error"
                tasks[0].result()
                generation.measure_end()
            else:
                reason = "disconnect"
        finally:
            # First the engine is told, then the coroutines that were waiting for it.
            generation.close(reason)
            for task in tasks:
                task.cancel()
            self._service.replies -= 1
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, send: Send) -> None:
        generation, formatter = self._generation, self._formatter
        generation.start(*self._service.config.load_limits)
        batches = generation.batches()
        first = await anext(batches)
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        await _send_body(send, formatter.opening() + formatter.batch(first))
        try:
            async for batch in batches:
                if body := formatter.batch(batch):
                    await _send_body(send, body)
        except ApiError as error:
            await _send_body(send, formatter.failure(error), more=False)
            return
        await _send_body(send, formatter.closing(generation.usage()), more=False)

    async def _whole(self, send: Send) -> None:
        generation = self._generation
        generation.start(*self._service.config.load_limits)
        choices = await collect(generation.batches(), generation.admitted.num_choices)
        whole, usage = self._formatter.whole, generation.usage()
        scored = sum([len(choice.logprobs) for choice in choices])
        many = scored > MANY_SCORED
        body = await self._service.parser.run(whole, choices, usage) if many else whole(choices, usage)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_body(send, body, more=False)


async def collect(batches: AsyncIterator[list[Piece]], count: int) -> list[Piece]:
    """Each choice in one piece, in order."""
    pieces: list[list[Piece]] = [[] for _ in range(count)]
    async for batch in batches:
        for piece in batch:
            pieces[piece.index].append(piece)
    return [_joined(index, parts) for index, parts in enumerate(pieces)]


def _joined(index: int, parts: list[Piece]) -> Piece:
    if not parts:
        return Piece(index, "", [], None)
    ids = [token_id for part in parts for token_id in part.token_ids]
    logprobs = [token for part in parts for token in part.logprobs]
    text = "".join([part.text for part in parts])
    return Piece(index, text, ids, parts[-1].finish_reason, logprobs, parts[-1].mean_logprob)


async def _send_body(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
