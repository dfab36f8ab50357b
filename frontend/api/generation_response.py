"""ASGI response of a generation, streamed or whole.

It ends as soon as the client disconnects.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, TypeVarTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.frontend.access.api_key import api_key
from tandem.frontend.api.formatter import Formatter
from tandem.frontend.api.live_stream import WRITER_KEY, AnswerWriter, LiveStream
from tandem.frontend.api.request_scope import request_record
from tandem.frontend.api.service import Service
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.generation import Generation
from tandem.frontend.generation.key_claim import key_claim
from tandem.frontend.generation.prompt_log import log_request
from tandem.frontend.generation.request_record import RequestRecord
from tandem.frontend.generation.usage import Usage
from tandem.frontend.metrics.key_metrics import KeyUsage

MAX_INLINE_LOGPROBS = 1024
"""Maximum number of tokens with log-probabilities for which a whole response is encoded in the event loop."""

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Disable buffering in proxies.
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """Run a generation and send its output.

    Nothing is sent before the engine's first event, so that a rejection is an HTTP status (raised as ApiError, for the
    app's exception handlers); later errors are events of the stream. A stream that waits long for that event is started
    without it, because proxies cut silent connections.
    """

    background = None

    def __init__(self, generation: Generation, formatter: Formatter, service: Service) -> None:
        self.status_code = 200
        self._generation = generation
        self._formatter = formatter
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, writer, reason = self._generation, scope[WRITER_KEY], "cancelled"
        task = asyncio.current_task()
        assert task is not None
        if writer.has_left:
            return

        def leave() -> None:
            # Abort in the engine first, then cancel the coroutine that waits for output.
            nonlocal reason
            reason = "disconnect"
            generation.close(reason)
            task.cancel()

        config, record = self._service.config, request_record(scope)
        record.key = api_key(scope)
        record.claim = key_claim(record.key, generation.admitted, config.prefix_cache_scope == "server")
        start = partial(generation.start, *config.load_limits, record, config.request_timeout)
        usage = self._begin_usage(record)
        self._service.num_responses += 1
        if config.log_requests:
            log_request(record, generation.admitted, self._service.tokenizer, config.max_log_len)
        try:
            writer.set_leave(leave)
            if generation.admitted.options.stream:
                await self._stream(send, start, writer, record)
            else:
                await self._whole(send, start)
            if not record.error:  # error of a broken stream
                generation.measure_end()
        except asyncio.CancelledError:
            if reason != "disconnect" or task.uncancel():
                raise
        except Exception:
            reason = "error"
            raise
        finally:
            writer.set_leave(None)
            generation.close(reason)
            record.describe(generation.admitted, generation.usage(), generation.drafts())
            if usage is not None:
                self._service.metrics.keys.end(usage)
            self._service.num_responses -= 1

    def _begin_usage(self, record: RequestRecord) -> KeyUsage | None:
        """Start counting the usage of the request's key; None without a key."""
        if record.key is None:
            return None
        generation = self._generation
        prompt_tokens = generation.admitted.prompt_tokens
        usage = KeyUsage(record.key.name, prompt_tokens, lambda: generation.usage().completion_tokens)
        self._service.metrics.keys.begin(usage, generation.admitted.options.stream)
        return usage

    async def _stream(self, send: Send, start: Callable[[], None], writer: AnswerWriter, record: RequestRecord) -> None:
        generation, formatter, config = self._generation, self._formatter, self._service.config
        start()
        begun = False
        try:
            batches = generation.batches(*config.stream_waits)
            async for batch in batches:
                opening = b""
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                    opening = formatter.opening(generation.usage())
                if body := opening + (formatter.batch(batch) if batch else formatter.keep_alive):
                    await _send_body(send, body)
                if batch:
                    break
            await batches.aclose()
            if generation.error is not None:
                raise generation.error
            if not generation.has_ended:
                await LiveStream(generation, formatter, writer, self._service.ticks, config.stream_waits[1]).run()
        except ApiError as error:
            if not begun:
                raise
            record.error = error.code or "error"
            self._service.metrics.broken_streams.labels(error.code or "").inc()
            await _send_body(send, await self.fail(error), more=False)
            return
        await _send_body(send, await self.end(generation.usage()), more=False)

    async def _whole(self, send: Send, start: Callable[[], None]) -> None:
        generation = self._generation
        start()
        choices = await generation.collect()
        body = await self.encode(choices, generation.usage())
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_body(send, body, more=False)

    async def end(self, usage: Usage) -> bytes:
        """Return the end of a successful stream."""
        return self._formatter.closing(usage)

    async def fail(self, error: ApiError) -> bytes:
        """Return the end of a failed stream."""
        return self._formatter.failure(error)

    async def encode(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        """Encode a response without streaming."""
        return await self.run_apart(choices, self._formatter.whole, choices, usage)

    async def run_apart(
        self, choices: Sequence[ChoiceDelta], format_choices: Callable[[*_Arguments], _Result], *arguments: *_Arguments
    ) -> _Result:
        """Run a function that formats choices.

        It runs in a thread if there are many log-probabilities.
        """
        inline = sum([len(choice.logprobs) for choice in choices]) <= MAX_INLINE_LOGPROBS
        return format_choices(*arguments) if inline else await self._service.parser.run(format_choices, *arguments)


async def _send_body(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
