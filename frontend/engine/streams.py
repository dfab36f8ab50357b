"""Token streams, from step outputs to the coroutine that answers a request."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence

from tandem.protocol.codec import runs
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Failure, Finished, SequenceTimes, StepOutput, TokenLogprobs, TracedOutput

logger = logging.getLogger(__name__)

Terminal = Finished | Failure


class Turn:
    """Calls that are made together at the end of a turn of the event loop."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []

    def add(self, call: Callable[[], None]) -> None:
        """Make a call at the end of this turn."""
        if not self._calls:
            asyncio.get_running_loop().call_soon(self._make)
        self._calls.append(call)

    def _make(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            try:
                call()
            except Exception:  # a bug in one must not cost the others their output
                logger.exception("output of the engine could not be handled")


class ReadySet:
    """Streams of one consumer that have an update.

    Many become ready with one wake-up per turn of the event loop. A consumer waits for them, or is called (`listen`),
    which saves the switches to its task and back.
    """

    __slots__ = ("_alarm", "_deadline", "_future", "_is_calling", "_listener", "_ready", "has_ended_stream", "turn")

    def __init__(self) -> None:
        self.turn = Turn()
        """Calls of the present turn of the event loop, which sets of one client share."""
        self.has_ended_stream = False
        """True if one of the ready streams has ended."""
        self._ready: list[TokenStream] = []
        self._listener: Callable[[], None] | None = None
        self._is_calling = False
        """True if the listener will be called at the end of this turn of the event loop."""
        self._future: asyncio.Future[None] | None = None
        self._deadline = 0.0
        """Time of the event loop at which the present wait ends without a stream."""
        self._alarm: asyncio.TimerHandle | None = None
        """Timer that outlives a wait and moves on to the deadline of a later one: most waits are too short to pay for a
        timer of their own."""

    def add(self, stream: "TokenStream") -> None:
        """Add a stream that is not in the set, and wake the consumer."""
        self._ready.append(stream)
        self._wake()

    def add_end(self) -> None:
        """Record that a stream of the set has ended, and wake the consumer once more."""
        self.has_ended_stream = True
        self._wake()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call a function from now on, instead of ending waits.

        It is called in the event loop at the end of each turn in which the first stream became ready, or one ended. It
        may leave the streams in the set.
        """
        self._listener = listener
        if self._ready:
            self._wake()

    def take(self) -> "list[TokenStream]":
        """Remove and return all streams that are ready."""
        ready, self._ready = self._ready, []
        self.has_ended_stream = False
        return ready

    def __len__(self) -> int:
        return len(self._ready)

    async def wait(self, seconds: float | None = None) -> "list[TokenStream]":
        """Wait until a stream is ready; remove and return all that are.

        After `seconds` without one return none. A consumer that limits its waits calls `close` at its end.
        """
        if not self._ready:
            loop = asyncio.get_running_loop()
            self._future = loop.create_future()
            self._deadline = math.inf if seconds is None else loop.time() + seconds
            if seconds is not None and (self._alarm is None or self._alarm.when() > self._deadline):
                self._set_alarm(loop)
            try:
                await self._future
            finally:
                self._future = None
        return self.take()

    def close(self) -> None:
        """End the timer of waits, and call no listener again. Idempotent."""
        self._listener = None
        self._end_alarm()

    def _end_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _set_alarm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._end_alarm()
        self._alarm = loop.call_at(self._deadline, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the present wait if it has come to its deadline; else ring again then."""
        self._alarm = None
        if self._future is None or self._deadline == math.inf:
            return  # The next wait with a limit sets the alarm.
        if loop.time() < self._deadline:
            self._set_alarm(loop)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._listener is not None:
            if not self._is_calling:
                self._is_calling = True
                self.turn.add(self._call)
        elif self._future is not None and not self._future.done():
            self._future.set_result(None)

    def _call(self) -> None:
        self._is_calling = False
        if self._listener is not None:
            self._listener()


class TokenStream:
    """Output of one request, as a stream of tokens.

    While the consumer lags, tokens collect in the stream, so memory is bounded by the length of the output and one
    `take` gets everything. Whatever follows the one terminal event is ignored.
    """

    __slots__ = (
        *("_is_ready", "_logprobs", "_pending", "_ready_set", "_terminal"),
        *("cached_tokens", "choice", "is_started", "queued_tokens", "request_id", "times"),
    )

    def __init__(self, request_id: int, choice: int, ready_set: ReadySet, prompt_len: int = 0) -> None:
        self.request_id = request_id
        self.choice = choice
        """Index among the choices of the HTTP request."""
        self.cached_tokens = 0
        """Prompt tokens that the engine found in its cache; known when the first token arrives."""
        self.is_started = False
        """True once the engine has said that it starts the request, or has sent output of it."""
        self.queued_tokens = prompt_len
        """Prompt tokens that wait for their first output; 0 from the first token on, and for a choice that shares its
        prompt with the first one."""
        self.times: SequenceTimes | None = None
        """Times in the engine, of a request that is traced."""
        self._ready_set = ready_set
        self._pending: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._terminal: Terminal | None = None
        self._is_ready = False

    def put(self, tokens: Sequence[int]) -> None:
        """Append tokens of the output."""
        self.is_started, self.queued_tokens = True, 0
        if self._terminal is None and tokens:
            self._pending += tokens
            if not self._is_ready:
                self._is_ready = True
                self._ready_set.add(self)

    def put_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Append log-probabilities, without waking the consumer.

        The tokens that they belong to wake it.
        """
        if self._terminal is None:
            self._logprobs.append(logprobs)

    def end(self, terminal: Terminal) -> None:
        """Record the terminal event, unless there was one."""
        if self._terminal is None:
            self._terminal = terminal
            if not self._is_ready:
                self._is_ready = True
                self._ready_set.add(self)
            self._ready_set.add_end()

    def take(self) -> tuple[list[int], Terminal | None, list[TokenLogprobs]]:
        """Remove and return the tokens and log-probabilities since the last call.

        The terminal event comes with them if the stream has ended. The log-probabilities are those of these tokens, and
        of the prompt ahead of the first, where requested.
        """
        tokens, self._pending = self._pending, []
        logprobs, self._logprobs = self._logprobs, []
        self._is_ready = False
        return tokens, self._terminal, logprobs


class OpenStreams:
    """Streams of one frontend without a terminal event, by request id."""

    def __init__(self) -> None:
        self._streams: dict[int, TokenStream] = {}
        self._turn = Turn()

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def queued_tokens(self) -> int:
        """Number of prompt tokens of streams that wait for their first output."""
        return sum([stream.queued_tokens for stream in self._streams.values()])

    def open(self, request_id: int, choice: int, ready_set: ReadySet, prompt_len: int) -> TokenStream:
        """Create the stream of a request."""
        ready_set.turn = self._turn
        stream = self._streams[request_id] = TokenStream(request_id, choice, ready_set, prompt_len)
        return stream

    def forget(self, request_ids: Iterable[int]) -> list[int]:
        """Remove streams without a terminal event.

        Return the ids of those that were open.
        """
        return [request_id for request_id in request_ids if self._streams.pop(request_id, None) is not None]

    def deliver(self, output: StepOutput) -> None:
        """Route a step output to its streams, ignoring requests that are not open.

        Raises ProtocolError if the columns of the output disagree.
        """
        streams = self._streams
        if isinstance(output, TracedOutput):
            for times in output.times:
                if (stream := streams.get(times.request_id)) is not None:
                    stream.times = times
        for started in output.started:
            if (stream := streams.get(started.request_id)) is not None:
                stream.cached_tokens = started.cached_tokens
                stream.is_started = True
        for request_id, tokens in runs(output):
            if (stream := streams.get(request_id)) is not None:
                stream.put(tokens)
        for logprobs in output.logprobs:
            if (stream := streams.get(logprobs.request_id)) is not None:
                stream.put_logprobs(logprobs)
        terminals: list[Terminal] = [*output.finished, *output.failures]
        for terminal in terminals:
            if (stream := streams.pop(terminal.request_id, None)) is not None:
                stream.end(terminal)

    def fail_all(self, code: ErrorCode, message: str) -> list[int]:
        """End every stream with this error; return the ids of those that were open."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end(Failure(stream.request_id, code, message))
        return list(streams)
