"""One HTTP request under way in the engine: its sequences, their text, and their end."""

import time
from collections.abc import AsyncIterator, Callable

from msgspec import Struct, structs

from frontend.admission import Admitted, check_overload
from frontend.choice import Choice, Piece
from frontend.engine_client import EngineClient
from frontend.errors import ApiError, from_failure
from frontend.metrics import FrontendMetrics
from frontend.stop_strings import StopMatcher
from frontend.streams import Delta, TokenStream, Waker
from frontend.tokenizer import Tokenizer
from protocol.commands import Submit
from protocol.errors import ErrorCode, FinishReason
from protocol.events import Failure


class Usage(Struct, frozen=True):
    """Tokens of a request as OpenAI counts them: a prompt once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Generation:
    """The choices of one request, numbered prompt by prompt.

    Whoever calls `start` calls `close` in the end, whatever happened between: it frees what is still open.
    `arrived` is when the HTTP request did, on the same clock.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        metrics: FrontendMetrics,
        admitted: Admitted,
        arrived: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.admitted = admitted
        self._client = client
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock
        self._arrived = arrived
        self._waker = Waker()
        self._choices: list[Choice] = []
        self._open: dict[int, float] = {}
        """Request ids without an end yet, each with the time of its last tokens."""
        self._error: ApiError | None = None

    @property
    def without_engine(self) -> bool:
        """Nothing is to be generated: only `echo` is asked for."""
        return self.admitted.request.max_tokens == 0

    def start(self, max_concurrent: int) -> None:
        """Submits one sequence a choice. Raises ApiError 503 where the frontend or the engine takes no more."""
        request = self.admitted.request
        count = self.admitted.num_choices
        matcher = StopMatcher(request.stop) if request.stop else None
        self._choices = [
            Choice(index, self._tokenizer.detokenizer(), matcher and matcher.fresh(), request.min_tokens)
            for index in range(count)
        ]
        if self.without_engine:
            return
        check_overload(self._client.num_open, count, max_concurrent)
        for index in range(count):
            prompt = self.admitted.prompts[index // request.n]
            sampling = structs.replace(self.admitted.sampling, choice=index % request.n, max_tokens=prompt.max_tokens)
            command = Submit(self._client.next_id(), prompt.packed, sampling)
            self._client.submit(command, index, self._waker)
            self._open[command.request_id] = self._arrived
            self._metrics.running.inc()

    async def batches(self) -> AsyncIterator[list[Piece]]:
        """What each turn of the event loop brought, never an empty list, until every choice has ended.

        Raises ApiError when one choice fails; the caller closes the rest. What came before is yielded first, unless
        it is the first batch: nothing was sent yet, so the failure of any choice in it can be an HTTP status, as
        where the engine has room for some choices alone.
        """
        begun = False
        if self.without_engine:
            yield [Piece(choice.index, "", [], FinishReason.LENGTH.value) for choice in self._choices]
        while self._open:
            ready = await self._waker.wait()
            pieces = [self._advance(stream) for stream in ready if stream.request_id in self._open]
            shown = [piece for piece in pieces if not piece.is_empty]
            if shown and (begun or self._error is None):
                begun = True
                yield shown
            if self._error is not None:
                raise self._error

    def close(self, reason: str) -> None:
        """Frees every sequence that is still open, at once; `reason` is for the metrics. Idempotent."""
        self._give_up(list(self._open), reason)

    def measure_end(self) -> None:
        """Counts a request that was answered in full."""
        self._metrics.latency.observe(self._clock() - self._arrived)
        self._metrics.prompt_tokens.inc(self.admitted.prompt_tokens)

    def usage(self) -> Usage:
        completion = sum(choice.num_tokens for choice in self._choices)
        return Usage(self.admitted.prompt_tokens, completion, self.admitted.prompt_tokens + completion)

    def _advance(self, stream: TokenStream) -> Piece:
        delta = stream.take()
        choice = self._choices[stream.choice]
        before = choice.num_tokens
        piece = choice.advance(delta.tokens, delta.terminal)
        self._measure(stream.request_id, before, choice.num_tokens)
        if delta.terminal is not None:
            self._forget(stream.request_id)
        elif piece.finish_reason is not None:
            self._give_up([stream.request_id], "stop_string")
        if piece.finish_reason is None and self._error is None:
            self._error = _error(delta)
        return piece

    def _measure(self, request_id: int, before: int, after: int) -> None:
        if after == before:
            return
        now = self._clock()
        last, self._open[request_id] = self._open[request_id], now
        self._metrics.generation_tokens.inc(after - before)
        if before == 0:
            self._metrics.first_token.observe(now - last)
        else:
            self._metrics.inter_token.observe((now - last) / (after - before))

    def _give_up(self, request_ids: list[int], reason: str) -> None:
        if not request_ids:
            return
        self._client.abort(request_ids)
        self._metrics.aborts.labels(reason).inc(len(request_ids))
        for request_id in request_ids:
            self._forget(request_id)

    def _forget(self, request_id: int) -> None:
        if self._open.pop(request_id, None) is not None:
            self._metrics.running.dec()


def _error(delta: Delta) -> ApiError | None:
    """Why a sequence ended without a finish reason, if it has."""
    if delta.terminal is None:
        return None
    if isinstance(delta.terminal, Failure):
        return from_failure(delta.terminal)
    return ApiError(500, "the engine gave the request up", None, ErrorCode.ENGINE_FAILED.value)
