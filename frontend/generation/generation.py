"""State of an HTTP request while the engine serves it.

It has the request's sequences, their text and their end.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from msgspec import UNSET, UnsetType

from tandem.frontend.engine.client import EngineClient
from tandem.frontend.engine.streams import DraftCounts, ReadySet, Terminal, TokenStream
from tandem.frontend.errors import RETRY_AFTER_SECONDS, ApiError, out_of_time
from tandem.frontend.generation.admission import Admitted, check_overload, check_queue
from tandem.frontend.generation.choice import Choice, ChoiceDelta, concatenated
from tandem.frontend.generation.request_record import RequestRecord
from tandem.frontend.generation.retry_budget import ENGINE_LOSSES, RetryBudget
from tandem.frontend.generation.sequences import new_choices, submit_command
from tandem.frontend.generation.tokenizer import Tokenizer
from tandem.frontend.generation.usage import (
    CompletionDetails,
    PromptDetails,
    Usage,
    WeightSpan,
    summarize,
    weight_spans,
)
from tandem.frontend.metrics.frontend_metrics import FrontendMetrics
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure

_RETRIED = ENGINE_LOSSES | {
    ErrorCode.OVERLOADED,
    ErrorCode.ENGINE_PAUSED,
    ErrorCode.ENGINE_SLEEPING,
    ErrorCode.WEIGHTS_CHANGED,
}
"""Failure codes after which the same request may succeed later."""


class Generation:
    """Choices of a request, numbered prompt by prompt.

    After `start`, `close` must always be called, to abort open sequences. `arrived` is the arrival time of the HTTP
    request on `clock`, in seconds.

    A request that loses its engine before `batches` has yielded a delta, or before `collect` has returned, is restarted
    on the next engine with the same seeds, and output of the lost engine is discarded. The client only sees a delay.
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
        self.arrived = arrived
        self._record = RequestRecord(arrived)
        self._ready_set = ReadySet()
        self._choices: list[Choice] = []
        self._collected: list[list[ChoiceDelta]] = []
        """Deltas of each choice, if they are collected."""
        self._streams: list[TokenStream] = []
        """Stream of each choice."""
        self._open: dict[int, float] = {}
        """Time of the last tokens of each open sequence, by request id."""
        self._measured: list[int] = []
        """Tokens of each choice already counted from lost engines; empty if none was lost."""
        self._failure: Terminal | None = None
        """Terminal event of a failed sequence."""
        self._error: ApiError | None = None
        """Error that ends the request."""
        self._link = 0
        """Number of the link on which the sequences were submitted."""
        self._retries = RetryBudget()
        self._is_held = False
        """True while the request waits for an engine."""
        self._lost_at = self._resubmitted_at = arrived
        """Time of the last loss, moved back by previous waits, and of the last resubmission."""
        self._is_collected = False
        """True for a response that is sent as a whole."""
        self._is_sent = False
        """True once output may have been sent."""
        self._deadline: asyncio.TimerHandle | None = None
        """Timer of the request timeout."""

    @property
    def without_engine(self) -> bool:
        """True if the request only echoes its prompts.

        The engine is not needed then.
        """
        options = self.admitted.options
        return options.max_tokens == 0 and options.prompt_logprobs is None

    def start(
        self, max_concurrent: int, max_queued_tokens: int, record: RequestRecord | None = None, timeout: float = 0.0
    ) -> None:
        """Submit one sequence per choice.

        record: collects the figures of the request, whose id is reported to the engine. timeout: seconds after arrival
        at which the request fails; 0 for no limit.

        Raises ApiError 429 if the frontend is at its limits, 503 if the engine is not ready.
        """
        admitted, client = self.admitted, self._client
        if record is not None:
            self._record = record
        self._begin()
        if self.without_engine:
            return
        max_concurrent, max_queued_tokens = client.load_limits(max_concurrent, max_queued_tokens)
        check_overload(client.num_open, admitted.num_choices, max_concurrent, client.retry_after_end)
        check_queue(client.queued_tokens, admitted.prompt_tokens, max_queued_tokens, client.retry_after_prefill)
        if timeout:
            left = self.arrived + timeout - self._clock()
            self._deadline = asyncio.get_running_loop().call_later(max(left, 0.0), self._expire, timeout)
        try:
            self._submit()
        except ApiError as error:
            self._drop_sequences()
            # Otherwise the engine was lost since its limits were read.
            self._lost_at = self._clock()
            if error.status != 503 or not self._await_engine():
                raise

    async def batches(
        self, first_wait: float | None = None, wait: float | None = None
    ) -> AsyncGenerator[list[ChoiceDelta], None]:
        """Yield the deltas of each event loop iteration until all choices have ended.

        A list is empty only on a timeout: `first_wait` seconds at the beginning, or `wait` seconds since the last list.
        Raises ApiError when a choice fails; the caller closes the others. Deltas of the same iteration are yielded
        first, except in the first batch: nothing has been sent yet, so the failure can still be an HTTP status, for
        example if the engine has capacity for some choices only.
        """
        begun = False
        if self.without_engine:
            yield [ChoiceDelta(choice.index, "", [], FinishReason.LENGTH.value) for choice in self._choices]
        while self._open or self._is_held or self.error is not None:
            if self.error is not None:
                raise self.error
            ready = await self._ready_set.wait(wait if begun else first_wait)
            if not ready and self._error is None:
                begun = True
                yield []
            shown = self._read(ready)
            if self._failure is not None and self._begin_anew(self._failure):
                continue
            if shown and (begun or self._failure is None):
                begun = True
                self._is_sent = not self._is_collected
                yield shown

    def follow(self, listener: Callable[[], None]) -> None:
        """Register a callback for new output to `take`, instead of `batches`.

        It is called at most once per event loop iteration, in the iteration in which the output arrives. Output that is
        not taken accumulates, and is announced again when a choice ends.
        """
        self._ready_set.listen(listener)

    def take(self) -> list[ChoiceDelta]:
        """Return the deltas of all new output.

        Afterwards `has_ended` and `error` show whether more will come.
        """
        return self._read(self._ready_set.take())

    @property
    def has_output(self) -> bool:
        """True if there is output to take."""
        return len(self._ready_set) > 0

    @property
    def has_ended_choice(self) -> bool:
        """True if a choice has ended with output to take."""
        return self._ready_set.has_ended_stream

    @property
    def has_ended(self) -> bool:
        """True if all choices have ended and their output was taken."""
        return not self._open

    @property
    def error(self) -> ApiError | None:
        """Error of the first choice that failed; None if none has."""
        if self._error is None and self._failure is not None:
            self._error = self._error_of(self._failure)
        return self._error

    def _error_of(self, terminal: Terminal) -> ApiError:
        """Return the error of a sequence that ended without a finish reason."""
        if not isinstance(terminal, Failure):
            return ApiError(500, "the engine aborted the request", None, ErrorCode.ENGINE_FAILED.value)
        admitted, retry_after = self.admitted, RETRY_AFTER_SECONDS
        if terminal.code in _RETRIED:
            retry_after = self._client.retry_after(terminal.code, admitted.num_choices, admitted.prompt_tokens)
        return self._retries.error(terminal, retry_after)

    async def collect(self, on_batch: Callable[[Sequence[ChoiceDelta]], None] | None = None) -> list[ChoiceDelta]:
        """Return each choice as one delta, in the order of their indices.

        on_batch: called with the deltas of each event loop iteration. Raises ApiError when a choice fails; the caller
        closes the others.
        """
        self._is_collected = True
        async for shown in self.batches():
            for delta in shown:
                self._collected[delta.index].append(delta)
            if on_batch is not None:
                on_batch(shown)
        return [concatenated(index, deltas) for index, deltas in enumerate(self._collected)]

    def close(self, reason: str) -> None:
        """Abort all open sequences.

        Idempotent. reason: label of the metrics.
        """
        self._stop(reason)
        self._record.end_attempt(self._clock(), self._streams)
        self._ready_set.close()
        if self._deadline is not None:
            self._deadline.cancel()

    def measure_end(self) -> None:
        """Record the metrics of a completed request."""
        longest = max([choice.num_tokens for choice in self._choices], default=0)
        numbers = (self.admitted.prompt_tokens, self.admitted.options.n, longest)
        self._metrics.ends.answered(self._clock() - self.arrived, self._record.decoding, *numbers)

    def usage(self) -> Usage:
        completion = sum(choice.num_tokens for choice in self._choices)
        # The other choices of a prompt hit the prefix cache.
        cached = sum(stream.cached_tokens for stream in self._streams[:: self.admitted.options.n])
        prompt, details = self.admitted.prompt_tokens, PromptDetails(cached)
        predicted: CompletionDetails | UnsetType = UNSET
        if self.admitted.options.prediction is not None:
            drafts = self.drafts()
            predicted = CompletionDetails(drafts.accepted_predicted, drafts.predicted - drafts.accepted_predicted)
        return Usage(prompt, completion, prompt + completion, details, predicted, *self._weight_versions())

    def _weight_versions(self) -> tuple[str | UnsetType, list[WeightSpan] | UnsetType]:
        """Return the version of the last tokens, and the spans of all choices if they have several versions."""
        streams = [stream for stream in self._streams if stream.versions]
        if not streams:
            return UNSET, UNSET
        numbers = [self._choices[stream.choice].num_tokens for stream in streams]
        found = [weight_spans(s.choice, s.versions, number) for s, number in zip(streams, numbers, strict=True)]
        return summarize([span for spans in found for span in spans], streams[-1].versions[-1][0])

    def drafts(self) -> DraftCounts:
        """Return the numbers of drafts of all choices.

        Those behind the end of a choice do not count as accepted.
        """
        total = DraftCounts()
        for stream in self._streams:
            own = stream.drafts(self._choices[stream.choice].num_tokens)
            total.drafted += own.drafted
            total.accepted += own.accepted
            total.predicted += own.predicted
            total.accepted_predicted += own.accepted_predicted
        return total

    def logits(self) -> bytearray:
        """Return the logits of the verified tokens of all choices, in the format of `TokenLogits.rows`."""
        return bytearray().join([rows for stream in self._streams for rows in stream.logits])

    @property
    def had_run(self) -> bool:
        """True if a lost engine had started to compute the request."""
        return self._retries.num_running_losses > 0

    def note_launched(self, request_ids: frozenset[int]) -> bool:
        if (failure := self._retries.note_launched(request_ids)) is not None:
            self.give_up(self._error_of(failure))
        return failure is None

    def resubmit(self) -> None:
        """Submit all sequences again, to the engine that has returned.

        Raises ApiError 503 if it is lost again.
        """
        try:
            self._submit()
        except ApiError:
            self._drop_sequences()
            raise
        self._is_held, self._resubmitted_at = False, self._clock()

    def give_up(self, error: ApiError) -> None:
        """Fail a request that waits for the engine."""
        self._is_held = False
        self._error = error
        self._ready_set.add_end()

    def _begin(self) -> None:
        """Reset the choices."""
        self._choices = new_choices(self.admitted, self._tokenizer)
        self._collected = [[] for _ in self._choices]

    def _submit(self) -> None:
        """Submit one sequence per choice.

        Raises ApiError 503 if the engine is not ready, possibly with some of them submitted.
        """
        client, record = self._client, self._record
        record.begin_attempt(self._clock(), client.facts)
        self._link = client.num_links
        group = 0
        for index in range(self.admitted.num_choices):
            number = client.next_id()
            group = group or number
            command = submit_command(self.admitted, index, number, group, record, self._retries.num_losses)
            self._streams.append(client.submit(command, index, self._ready_set))
            self._open[command.request_id] = self.arrived
            self._metrics.running.inc()

    def _drop_sequences(self) -> None:
        """Drop the sequences, which the engine has lost or is about to lose."""
        self._record.end_attempt(self._clock(), self._streams)
        self._client.abort(list(self._open))
        for request_id in list(self._open):
            self._forget(request_id)
        self._streams = []
        self._failure = None

    def _begin_anew(self, failure: Terminal) -> bool:
        """Discard the output of a lost engine, and wait for the next one.

        Return False if the request cannot be restarted: the failure is its own, output was sent, or too many engines
        were lost.
        """
        if self._is_sent or not isinstance(failure, Failure):
            return False
        had_run = any(stream.is_started for stream in self._streams)
        if failure.code in ENGINE_LOSSES:
            self._lost_at += self._clock() - self._resubmitted_at
            if not self._retries.lose(failure, had_run, [stream.request_id for stream in self._streams]):
                return False
        elif not self._retries.waits_for_room(failure, had_run):
            return False
        measured = self._measured or [0] * len(self._choices)
        self._measured = [max(count, choice.num_tokens) for count, choice in zip(measured, self._choices, strict=True)]
        self._drop_sequences()
        self._begin()
        if self._await_engine():
            return True
        self._failure = failure
        return False

    def _await_engine(self) -> bool:
        """Wait for the next engine; return False if the server does not hold requests."""
        self._is_held = True
        if not self._client.hold(self, self._link, self._lost_at):
            self._is_held = False
            return False
        return True

    def _read(self, ready: Sequence[TokenStream]) -> list[ChoiceDelta]:
        """Convert new tokens of streams to deltas with visible output."""
        now = self._clock()
        deltas: list[ChoiceDelta] = []
        for stream in [stream for stream in ready if stream.request_id in self._open]:
            self._advance(stream, now, deltas)
        return deltas

    def _advance(self, stream: TokenStream, now: float, deltas: list[ChoiceDelta]) -> None:
        """Append the deltas of a stream's new tokens.

        A stream of events gets a delta per token, other responses a single one.
        """
        tokens, terminal, logprobs = stream.take()
        choice = self._choices[stream.choice]
        before = choice.num_tokens
        if not self.admitted.options.max_tokens:
            tokens = []
        if self.admitted.options.stream_events:
            added = choice.advance_singly(tokens, terminal)
            deltas += [delta for delta in added if not delta.is_empty]
            delta = added[-1]
        else:
            delta = choice.advance(tokens, terminal, logprobs)
            if delta.text or delta.token_ids or delta.finish_reason:
                deltas.append(delta)
        if choice.num_tokens != before:
            self._measure(stream, before, choice.num_tokens, now)
        if delta.finish_reason is not None:
            self._record.finish_reasons.append(delta.finish_reason)
        if terminal is not None:
            self._forget(stream.request_id)
        elif delta.finish_reason is not None:
            self._abort([stream.request_id], "stop_string")
        if terminal is not None and delta.finish_reason is None and self._failure is None:
            self._failure = terminal

    def _measure(self, stream: TokenStream, before: int, after: int, now: float) -> None:
        """Record the new tokens of a sequence, and the inter-token latency."""
        last, self._open[stream.request_id] = self._open[stream.request_id], now
        self._record.tokens_arrived(now)
        if self._measured and before < (counted := self._measured[stream.choice]):
            self._metrics.generation_tokens.value += max(after - counted, 0)
            return
        self._metrics.generation_tokens.value += after - before
        if before:
            self._metrics.inter_token.observe(now - last)
        else:
            self._metrics.first_token.observe(now - last)

    def _expire(self, timeout: float) -> None:
        """Fail a request that has timed out."""
        if not (self._open or self._is_held):
            return
        self._stop("deadline")
        self._error = out_of_time(timeout)
        self._ready_set.add_end()

    def _stop(self, reason: str) -> None:
        """Stop waiting for an engine, and abort all open sequences."""
        self._client.release(self)
        self._is_held = False
        self._abort(list(self._open), reason)

    def _abort(self, request_ids: list[int], reason: str) -> None:
        if not request_ids:
            return
        self._client.abort(request_ids, FinishReason.STOP if reason == "stop_string" else FinishReason.ABORT)
        self._metrics.aborts.labels(reason).inc(len(request_ids))
        for request_id in request_ids:
            self._forget(request_id)

    def _forget(self, request_id: int) -> None:
        if self._open.pop(request_id, None) is not None:
            self._metrics.running.dec()
