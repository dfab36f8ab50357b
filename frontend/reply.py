"""The ASGI responses of a generation: streamed or whole. Both notice at once when the client goes away."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.choice import Piece
from frontend.errors import ApiError
from frontend.generation import Generation
from frontend.service import Service
from frontend.sse import DONE, CompletionChunks, ReplyHead, error_event
from protocol.version import distribution_version

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


class CompletionReply(Response):
    """Runs a generation and answers with it.

    Until the first event of the engine nothing is sent, so that a refusal is an HTTP status (as ApiError, for the
    exception handlers of the app); afterwards an error is an event of the stream.
    """

    background = None

    def __init__(self, generation: Generation, service: Service) -> None:
        self.status_code = 200
        self._generation = generation
        self._service = service
        self._max_concurrent = service.config.max_concurrent
        admitted = generation.admitted
        self._request = admitted.request
        self._head = ReplyHead(
            id=f"cmpl-{secrets.token_hex(16)}",
            object="text_completion",
            created=int(time.time()),
            model=admitted.model.name,
            system_fingerprint=f"tandem-{distribution_version()}-{admitted.model.device}-{admitted.model.dtype}",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        answer = self._stream(send) if self._request.stream else self._whole(send)
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
        generation, request = self._generation, self._request
        chunks = CompletionChunks(self._head, request.include_usage, request.return_token_ids)
        generation.start(self._max_concurrent)
        batches = generation.batches()
        first = await anext(batches)
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        await _send_body(send, self._opening(chunks) + b"".join([chunks.piece(piece) for piece in first]))
        try:
            async for batch in batches:
                if body := b"".join([chunks.piece(piece) for piece in batch]):
                    await _send_body(send, body)
        except ApiError as error:
            await _send_body(send, error_event(error), more=False)
            return
        usage = chunks.usage(generation.usage()) if request.include_usage else b""
        await _send_body(send, usage + DONE, more=False)

    def _opening(self, chunks: CompletionChunks) -> bytes:
        """The chunks ahead of all output: echoed prompts and their ids, where asked for."""
        if not (self._request.echo or self._request.return_token_ids):
            return b""
        prompts = self._generation.admitted.prompts
        return b"".join(
            chunks.prompt(
                prompt_index * self._request.n + choice, prompt.text if self._request.echo else "", prompt.ids
            )
            for prompt_index, prompt in enumerate(prompts)
            for choice in range(self._request.n)
        )

    async def _whole(self, send: Send) -> None:
        generation = self._generation
        generation.start(self._max_concurrent)
        choices = await self._collect(generation.batches())
        reply = {
            **msgspec.structs.asdict(self._head),
            "choices": choices,
            "usage": generation.usage(),
        }
        body = msgspec.json.encode(reply)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_body(send, body, more=False)

    async def _collect(self, batches: AsyncIterator[list[Piece]]) -> list[dict[str, object]]:
        """All choices of a whole reply, in order."""
        request, prompts = self._request, self._generation.admitted.prompts
        count = self._generation.admitted.num_choices
        texts: list[list[str]] = [[prompts[index // request.n].text] if request.echo else [] for index in range(count)]
        ids: list[list[int]] = [[] for _ in range(count)]
        reasons: list[str | None] = [None] * count
        async for batch in batches:
            for piece in batch:
                texts[piece.index].append(piece.text)
                ids[piece.index].extend(piece.token_ids)
                reasons[piece.index] = piece.finish_reason or reasons[piece.index]
        choices: list[dict[str, object]] = []
        for index in range(count):
            choice: dict[str, object] = {"index": index, "text": "".join(texts[index]), "logprobs": None}
            choice["finish_reason"] = reasons[index]
            if request.return_token_ids:
                choice["prompt_token_ids"] = prompts[index // request.n].ids
                choice["token_ids"] = ids[index]
            choices.append(choice)
        return choices


async def _send_body(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
