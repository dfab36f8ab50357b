"""Token streams from step outputs to the coroutines of requests."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct, structs

from tandem.protocol.codec import read_drafts, runs
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import (
    DetailedOutput,
    Failure,
    Finished,
    SequenceTimes,
    StepOutput,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)

Terminal = Finished | Failure

MAX_UNUSED_STEPS = 32
"""Maximum number of steps at the end of a stream with accepted drafts of which none may be used: those that the engine
computes until a stop string is found and the abort arrives."""


class Turn:
    """Callbacks run together at the end of an event loop iteration."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []

    def add(self, call: Callable[[], None]) -> None:
        """Schedule a callback for the end of this iteration."""
        if not self._calls:
            asyncio.get_running_loop().call_soon(self._make)
        self._calls.append(call)

    def _make(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            try:
                call()
            except Exception:  # an exception in one callback must not affect the others
                logger.exception("output of the engine could not be handled")


class ReadySet:
    """Set of a consumer's streams with updates.

    Any number become ready with one wakeup per event loop iteration. A consumer waits for them, or registers a callback
    (`listen`), which saves task switches.
    """

    __slots__ = ("_alarm", "_deadline", "_future", "_is_calling", "_listener", "_ready", "has_ended_stream", "turn")

    def __init__(self) -> None:
        self.turn = Turn()
        """Callbacks of the current iteration, shared by all sets of a client."""
        self.has_ended_stream = False
        """True if one of the ready streams has ended."""
        self._ready: list[TokenStream] = []
        self._listener: Callable[[], None] | None = None
        self._is_calling = False
        """True if the listener is scheduled for the end of this iteration."""
        self._future: asyncio.Future[None] | None = None
        self._deadline = 0.0
        """Event loop time at which the current wait times out."""
        self._alarm: asyncio.TimerHandle | None = None
        """Timer that is reused by later waits, as most are too short to justify one of their own."""

    def add(self, stream: "TokenStream") -> None:
        """Add a stream that is not in the set, and wake the consumer."""
        self._ready.append(stream)
        self._wake()

    def add_end(self) -> None:
        """Record that a stream in the set has ended, and wake the consumer again."""
        self.has_ended_stream = True
        self._wake()

    def listen(self, listener: Callable[[], None]) -> None:
        """Register a listener, which replaces waiting.

        It is called at the end of each iteration in which the first stream became ready, or a stream ended. It may
        leave streams in the set.
        """
        self._listener = listener
        if self._ready:
            self._wake()

    def take(self) -> "list[TokenStream]":
        """Remove and return all ready streams."""
        ready, self._ready = self._ready, []
        self.has_ended_stream = False
        return ready

    def __len__(self) -> int:
        return len(self._ready)

    async def wait(self, seconds: float | None = None) -> "list[TokenStream]":
        """Wait until a stream is ready; remove and return all ready streams.

        Return none after `seconds`. A consumer that uses a timeout must call `close` at its end.
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
        """Cancel the timer and unregister the listener. Idempotent."""
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
        """End the current wait if its deadline has passed; otherwise rearm the timer."""
        self._alarm = None
        if self._future is None or self._deadline == math.inf:
            return  # The next wait with a timeout sets the timer.
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


class DraftCounts(Struct):
    """Numbers of drafts that steps have verified."""

    drafted: int = 0
    accepted: int = 0
    """Number of those that were accepted."""
    predicted: int = 0
    """Number of those from the prediction of the request; likewise `accepted_predicted`, among the accepted ones."""
    accepted_predicted: int = 0

    def add(self, drafted: int, accepted: int, is_predicted: bool) -> None:
        """Count the drafts of one step."""
        self.drafted += drafted
        self.accepted += accepted
        if is_predicted:
            self.predicted += drafted
            self.accepted_predicted += accepted


class TokenStream:
    """Output of one request, as a stream of tokens.

    While the consumer lags, tokens accumulate in the stream, so memory is bounded by the output's length and one `take`
    returns everything. Events after the terminal event are ignored.
    """

    __slots__ = (
        *("_accepted", "_drafts", "_is_ready", "_logprobs", "_num_tokens", "_pending", "_ready_set", "_terminal"),
        *("cached_tokens", "choice", "is_started", "logits", "queued_tokens", "request_id", "times", "versions"),
    )

    def __init__(self, request_id: int, choice: int, ready_set: ReadySet, prompt_len: int = 0) -> None:
        self.request_id = request_id
        self.choice = choice
        """Index of the choice in the HTTP request."""
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache; known when the first token arrives."""
        self.is_started = False
        """True once the engine has reported the start of the request or sent output."""
        self.queued_tokens = prompt_len
        """Prompt tokens that wait for their first output; 0 after the first token, and for a choice that shares its
        prompt with the first one."""
        self.logits: list[bytes] = []
        """Logits of verified tokens, in order, each in the format of `TokenLogits.rows`."""
        self.versions: list[tuple[str, int]] = []
        """Versions of the weights that computed the output, each with the number of tokens before it; empty on an
        engine whose weights cannot change."""
        self.times: SequenceTimes | None = None
        """Times in the engine, for traced requests."""
        self._drafts = DraftCounts()
        """Drafts that were verified for the request so far, whether or not their tokens are used."""
        self._accepted: deque[tuple[int, int, bool]] = deque(maxlen=MAX_UNUSED_STEPS)
        """Of the last steps that accepted drafts: the number of tokens up to the last accepted one, the number of
        accepted drafts, and whether they are from the prediction."""
        self._num_tokens = 0
        self._ready_set = ready_set
        self._pending: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._terminal: Terminal | None = None
        self._is_ready = False

    def put(self, tokens: Sequence[int]) -> None:
        """Append tokens of the output."""
        self.is_started, self.queued_tokens = True, 0
        self._num_tokens += len(tokens)
        if self._terminal is None and tokens:
            self._pending += tokens
            if not self._is_ready:
                self._is_ready = True
                self._ready_set.add(self)

    def put_drafts(self, drafted: int, accepted: int, is_predicted: bool) -> None:
        """Count the drafts of a step, before its tokens are put."""
        self._drafts.add(drafted, accepted, is_predicted)
        if accepted:
            known = max(self._num_tokens, self._accepted[-1][0] + 1 if self._accepted else 0)
            self._accepted.append((known + accepted, accepted, is_predicted))

    def drafts(self, num_tokens: int) -> DraftCounts:
        """Return the numbers of drafts so far; the accepted ones are those among the first `num_tokens` tokens.

        The others follow a token that ended the output.
        """
        counts = structs.replace(self._drafts)
        for end, accepted, is_predicted in reversed(self._accepted):
            if end <= num_tokens:
                break
            unused = min(accepted, end - num_tokens)
            counts.accepted -= unused
            counts.accepted_predicted -= unused * is_predicted
        return counts

    def put_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Append log-probabilities, without waking the consumer.

        The consumer is woken by their tokens.
        """
        if self._terminal is None:
            self._logprobs.append(logprobs)

    def end(self, terminal: Terminal) -> None:
        """Record the terminal event, unless there is one."""
        if self._terminal is None:
            self._terminal = terminal
            if not self._is_ready:
                self._is_ready = True
                self._ready_set.add(self)
            self._ready_set.add_end()

    def take(self) -> tuple[list[int], Terminal | None, list[TokenLogprobs]]:
        """Remove and return new tokens and log-probabilities.

        The terminal event is included if the stream has ended. Log-probabilities are those of these tokens, preceded by
        the prompt's if requested.
        """
        tokens, self._pending = self._pending, []
        logprobs, self._logprobs = self._logprobs, []
        self._is_ready = False
        return tokens, self._terminal, logprobs


class OpenStreams:
    """Open streams of a frontend, by request id."""

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
        """Route a step output to its streams, ignoring closed ones.

        Raises ProtocolError if the columns are inconsistent.
        """
        streams = self._streams
        if isinstance(output, DetailedOutput):
            for times in output.times:
                if (stream := streams.get(times.request_id)) is not None:
                    stream.times = times
            for logits in output.logits:
                if (stream := streams.get(logits.request_id)) is not None:
                    stream.logits.append(logits.rows)
            for request_id, drafted, accepted, source in read_drafts(output):
                if (stream := streams.get(request_id)) is not None:
                    stream.put_drafts(drafted, accepted, source > 0)
        for started in output.started:
            if (stream := streams.get(started.request_id)) is not None:
                stream.cached_tokens = started.cached_tokens
                if started.weight_version and [started.weight_version] != [name for name, _ in stream.versions[-1:]]:
                    stream.versions.append((started.weight_version, started.generated))
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
        """Fail all streams with this error; return their ids."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end(Failure(stream.request_id, code, message))
        return list(streams)
