"""Tokens on their way from the engine's messages to the coroutine that answers a request."""

import asyncio
from collections.abc import Iterable, Sequence

from msgspec import Struct

from tandem.protocol.events import Failure, Finished, TokenLogprobs


class PromptQueue:
    """Sequences by id, from their submission to their first event."""

    def __init__(self) -> None:
        self.tokens = 0
        self._lengths: dict[int, int] = {}

    def add(self, request_id: int, length: int) -> None:
        self._lengths[request_id] = length
        self.tokens += length

    def remove(self, request_id: int) -> None:
        """Idempotent."""
        self.tokens -= self._lengths.pop(request_id, 0)

    def remove_all(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            self.remove(request_id)


Terminal = Finished | Failure


class StreamUpdate(Struct, frozen=True):
    """Tokens that one stream gained since the last look, and how it ended if it has."""

    tokens: list[int]
    terminal: Terminal | None
    logprobs: list[TokenLogprobs] = []
    """Of these tokens, and of the prompt ahead of the first, where they were asked for."""


class ReadySet:
    """Wakes one consumer of any number of streams: one future for whatever became ready in one event-loop turn."""

    __slots__ = ("_future", "_ready")

    def __init__(self) -> None:
        self._ready: list[TokenStream] = []
        self._future: asyncio.Future[None] | None = None

    def mark(self, stream: "TokenStream") -> None:
        self._ready.append(stream)
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> "list[TokenStream]":
        """The streams that have something, at least one."""
        while not self._ready:
            self._future = asyncio.get_running_loop().create_future()
            try:
                await self._future
            finally:
                self._future = None
        ready, self._ready = self._ready, []
        return ready


class TokenStream:
    """The output of one request.

    Where the consumer lags, tokens collect in one pending delta, so memory is bounded by the length of the output
    and a wake-up takes all there is. After the one terminal event nothing is taken any more.
    """

    __slots__ = ("_logprobs", "_marked", "_pending", "_ready_set", "_terminal", "cached_tokens", "choice", "request_id")

    def __init__(self, request_id: int, choice: int, ready_set: ReadySet) -> None:
        self.request_id = request_id
        self.choice = choice
        self.cached_tokens = 0
        """Prompt tokens that the engine did not have to compute; known when the first token arrives."""
        self._ready_set = ready_set
        self._pending: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._terminal: Terminal | None = None
        self._marked = False

    def put(self, tokens: Sequence[int]) -> None:
        if self._terminal is None and tokens:
            self._pending.extend(tokens)
            self._mark()

    def put_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Wakes nobody: the tokens that they belong to, or the first after the prompt, do."""
        if self._terminal is None:
            self._logprobs.append(logprobs)

    def finish(self, finished: Finished) -> None:
        self._end(finished)

    def fail(self, failure: Failure) -> None:
        self._end(failure)

    def take(self) -> StreamUpdate:
        """All there is, for a consumer that was woken."""
        tokens, self._pending = self._pending, []
        logprobs, self._logprobs = self._logprobs, []
        self._marked = False
        return StreamUpdate(tokens, self._terminal, logprobs)

    def _end(self, terminal: Terminal) -> None:
        if self._terminal is None:
            self._terminal = terminal
            self._mark()

    def _mark(self) -> None:
        if not self._marked:
            self._marked = True
            self._ready_set.mark(self)
