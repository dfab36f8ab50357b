"""Streams of tokens from the engine's messages to the coroutine that answers a request."""

import asyncio
from collections.abc import Sequence

from msgspec import Struct

from tandem.protocol.events import Failure, Finished, TokenLogprobs

Terminal = Finished | Failure


class StreamUpdate(Struct, frozen=True):
    """Tokens that one stream gained since the last `take`, and its terminal event once it has ended."""

    tokens: list[int]
    terminal: Terminal | None
    logprobs: list[TokenLogprobs] = []
    """Log-probabilities of these tokens, and of the prompt ahead of the first, where they were requested."""


class ReadySet:
    """Streams of one consumer that have an update; many become ready with one wake-up per turn of the event loop."""

    __slots__ = ("_future", "_ready")

    def __init__(self) -> None:
        self._ready: list[TokenStream] = []
        self._future: asyncio.Future[None] | None = None

    def add(self, stream: "TokenStream") -> None:
        """Add a stream that is not in the set, and wake the consumer."""
        self._ready.append(stream)
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> "list[TokenStream]":
        """Wait until a stream is ready; remove and return all that are."""
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

    While the consumer lags, tokens collect in one pending update, so memory is bounded by the length of the output
    and one `take` gets everything. Whatever follows the one terminal event is ignored.
    """

    __slots__ = (
        *("_is_ready", "_logprobs", "_pending", "_ready_set", "_terminal"),
        *("cached_tokens", "choice", "queued_tokens", "request_id"),
    )

    def __init__(self, request_id: int, choice: int, ready_set: ReadySet, prompt_len: int = 0) -> None:
        self.request_id = request_id
        self.choice = choice
        """Index among the choices of the HTTP request."""
        self.cached_tokens = 0
        """Prompt tokens that the engine found in its cache; known when the first token arrives."""
        self.queued_tokens = prompt_len
        """Prompt tokens that wait for their first output; 0 from the first token on."""
        self._ready_set = ready_set
        self._pending: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._terminal: Terminal | None = None
        self._is_ready = False

    def put(self, tokens: Sequence[int]) -> None:
        """Append tokens of the output."""
        self.queued_tokens = 0
        if self._terminal is None and tokens:
            self._pending.extend(tokens)
            self._mark_ready()

    def put_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Append log-probabilities, without waking the consumer: the tokens that they belong to do."""
        if self._terminal is None:
            self._logprobs.append(logprobs)

    def end(self, terminal: Terminal) -> None:
        """Record the terminal event, unless there was one."""
        if self._terminal is None:
            self._terminal = terminal
            self._mark_ready()

    def take(self) -> StreamUpdate:
        """Remove and return everything that arrived since the last call."""
        tokens, self._pending = self._pending, []
        logprobs, self._logprobs = self._logprobs, []
        self._is_ready = False
        return StreamUpdate(tokens, self._terminal, logprobs)

    def _mark_ready(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._ready_set.add(self)
