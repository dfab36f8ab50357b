"""State of one HTTP request while the engine serves it.

The state comprises its sequences, their text and their end.
"""

import time
from collections.abc import AsyncGenerator, Callable, Sequence

from msgspec import Struct, structs

from tandem.frontend.engine.client import EngineClient
from tandem.frontend.engine.streams import ReadySet, Terminal, TokenStream
from tandem.frontend.errors import ApiError, from_failure
from tandem.frontend.generation.admission import Admitted, AdmittedPrompt, check_overload, check_queue
from tandem.frontend.generation.choice import Choice, ChoiceDelta
from tandem.frontend.generation.scored_tokens import EchoedPrompt, ScoredTokens, echoed_prompt
from tandem.frontend.generation.stop_strings import StopMatcher
from tandem.frontend.generation.tokenizer import Tokenizer
from tandem.frontend.metrics import FrontendMetrics
from tandem.protocol.commands import Submit
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure
from tandem.protocol.params import SamplingParams


class PromptDetails(Struct, frozen=True):
    """Details of a request's prompt tokens, as OpenAI reports them."""

    cached_tokens: int = 0
    """Prompt tokens found in the KV cache when the first choice of each prompt started."""


class Usage(Struct, frozen=True):
    """Token counts of a request as OpenAI reports them.

    Each prompt counts once, however many choices it has.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()


class Generation:
    """Choices of one request, numbered prompt by prompt.

    After `start`, `close` has to be called whatever happens, to free the sequences that are still open. `arrived` is
    the time of the HTTP request's arrival on `clock`, in seconds.
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
        self._ready_set = ReadySet()
        self._choices: list[Choice] = []
        self._firsts: list[TokenStream] = []
        """Stream of each prompt's first choice; the others find in the cache what it has computed."""
        self._open: dict[int, float] = {}
        """Time of the last tokens of each sequence that has not ended, by request id."""
        self._error: ApiError | None = None

    @property
    def without_engine(self) -> bool:
        """True if the request only echoes its prompts.

        Nothing has to be computed then.
        """
        options = self.admitted.options
        return options.max_tokens == 0 and options.prompt_logprobs is None

    def start(self, max_concurrent: int, max_queued_tokens: int, request_id: str = "") -> None:
        """Submit one sequence per choice.

        `request_id` is the id of the HTTP request, which the engine shows to its operators.

        Raises ApiError 429 if the frontend has no room for them, 503 if the engine is not ready.
        """
        admitted, options = self.admitted, self.admitted.options
        count = admitted.num_choices
        matcher = StopMatcher(options.stop) if options.stop else None
        echoed = [self._echoed(prompt) for prompt in admitted.prompts]
        self._choices = [self._choice(index, matcher, echoed[index // options.n]) for index in range(count)]
        if self.without_engine:
            return
        client, tokens = self._client, admitted.prompt_tokens * options.n
        check_overload(client.num_open, count, max_concurrent, client.seconds_until_ended)
        check_queue(client.queued_tokens, tokens, max_queued_tokens, client.seconds_until_prefilled)
        group = 0
        for index in range(count):
            prompt = admitted.prompt_of(index)
            command = self._command(prompt, index % options.n, request_id, group)
            group = group or command.request_id
            stream = self._client.submit(command, index, self._ready_set)
            if index % options.n == 0:
                self._firsts.append(stream)
            self._open[command.request_id] = self._arrived
            self._metrics.running.inc()

    async def batches(
        self, first_wait: float | None = None, wait: float | None = None
    ) -> AsyncGenerator[list[ChoiceDelta], None]:
        """Yield the deltas of each turn of the event loop until every choice has ended.

        A list of deltas is empty only if nothing came for `first_wait` seconds at the beginning, or for `wait` seconds
        since the last list. Raises ApiError when one choice fails; the caller closes the others. Deltas of the same
        turn are yielded first, except in the first batch: nothing has been sent yet, so the failure can still be an
        HTTP status, for example when the engine has room for only some of the choices.
        """
        begun = False
        if self.without_engine:
            yield [ChoiceDelta(choice.index, "", [], FinishReason.LENGTH.value) for choice in self._choices]
        while self._open:
            ready = await self._ready_set.wait(wait if begun else first_wait)
            if not ready:
                begun = True
                yield []
            shown = self._read(ready)
            if shown and (begun or self._error is None):
                begun = True
                yield shown
            if self._error is not None:
                raise self._error

    def follow(self, listener: Callable[[], None]) -> None:
        """Call a function whenever there is something to `take`, in place of `batches`.

        It is called at most once in a turn of the event loop, in the turn in which the output arrives. What it does not
        take collects, and is announced again when a choice ends.
        """
        self._ready_set.listen(listener)

    def take(self) -> list[ChoiceDelta]:
        """Return the deltas of all output that has arrived.

        Afterwards `has_ended` and `error` tell if more will come.
        """
        return self._read(self._ready_set.take())

    @property
    def has_output(self) -> bool:
        """True if output has arrived that was not taken."""
        return len(self._ready_set) > 0

    @property
    def has_ended_choice(self) -> bool:
        """True if a choice has ended whose last output was not taken."""
        return self._ready_set.has_ended_stream

    @property
    def has_ended(self) -> bool:
        """True if every choice has ended and was taken."""
        return not self._open

    @property
    def error(self) -> ApiError | None:
        """The error of the first choice that failed; None while none has."""
        return self._error

    def close(self, reason: str) -> None:
        """Abort every sequence that is still open.

        Idempotent. `reason` is a label of the metrics.
        """
        self._abort(list(self._open), reason)
        self._ready_set.close()

    def measure_end(self) -> None:
        """Record the metrics of a request that was answered in full."""
        self._metrics.latency.observe(self._clock() - self._arrived)
        self._metrics.prompt_tokens.inc(self.admitted.prompt_tokens)

    def usage(self) -> Usage:
        completion = sum(choice.num_tokens for choice in self._choices)
        prompt, cached = self.admitted.prompt_tokens, sum(stream.cached_tokens for stream in self._firsts)
        return Usage(prompt, completion, prompt + completion, PromptDetails(cached))

    def _choice(self, index: int, matcher: StopMatcher | None, echoed: EchoedPrompt | None) -> Choice:
        options, scored = self.admitted.options, None
        if options.logprobs is not None or options.num_returned is not None:
            prompt = self.admitted.prompt_of(index)
            scored = ScoredTokens(self._tokenizer.bytes_of, len(prompt.ids), len(prompt.text), echoed)
        detokenizer = self._tokenizer.detokenizer(options.skip_special_tokens)
        matcher = matcher and matcher.fresh()
        return Choice(index, detokenizer, matcher, options.min_tokens, options.include_stop, scored)

    def _echoed(self, prompt: AdmittedPrompt) -> EchoedPrompt | None:
        """Return the echoed form of a prompt, or None if it is not wanted.

        It is wanted if the log-probabilities of the prompt were requested.
        """
        if self.admitted.options.prompt_logprobs is None:
            return None
        return echoed_prompt(prompt.ids, prompt.text, self._tokenizer.detokenizer())

    def _command(self, prompt: AdmittedPrompt, choice: int, request_id: str, group: int) -> Submit:
        """Build the message that submits one choice.

        `group` is the number of the request's first message, 0 for that message itself. A request that only scores its
        prompts asks the engine for one token and discards it.
        """
        admitted, options = self.admitted, self.admitted.options
        sampling, constraint, logprobs = admitted.sampling, admitted.constraint, options.logprobs
        if options.max_tokens == 0:
            sampling, constraint, logprobs = SamplingParams(1, temperature=0.0, ignore_eos=True), None, None
        else:
            sampling = structs.replace(sampling, choice=choice, max_tokens=prompt.max_tokens)
            if options.num_returned is not None and logprobs is None:
                logprobs = 0  # the mean that ranks choices needs no alternatives
        number = self._client.next_id()
        return Submit(
            request_id=number,
            prompt_ids=prompt.packed,
            sampling=sampling,
            constraint=constraint,
            logprobs=logprobs,
            prompt_logprobs=options.prompt_logprobs,
            priority=options.priority,
            session=options.session_id,
            cache_salt=options.cache_salt,
            http_request_id=request_id,
            group=group or number,
        )

    def _read(self, ready: Sequence[TokenStream]) -> list[ChoiceDelta]:
        """Turn the new tokens of streams into deltas that have something to send."""
        now = self._clock()
        deltas: list[ChoiceDelta] = []
        for stream in ready:
            if stream.request_id in self._open:
                self._advance(stream, now, deltas)
        return deltas

    def _advance(self, stream: TokenStream, now: float, deltas: list[ChoiceDelta]) -> None:
        """Append the deltas of a stream's new tokens.

        A stream of events gets one delta per token, any other response a single one.
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
            self._measure(stream.request_id, before, choice.num_tokens, now)
        if terminal is not None:
            self._forget(stream.request_id)
        elif delta.finish_reason is not None:
            self._abort([stream.request_id], "stop_string")
        if terminal is not None and delta.finish_reason is None and self._error is None:
            self._error = _failure(terminal)

    def _measure(self, request_id: int, before: int, after: int, now: float) -> None:
        """Count the new tokens of a sequence, and the time since its last ones."""
        last, self._open[request_id] = self._open[request_id], now
        self._metrics.generation_tokens.value += after - before
        if before:
            self._metrics.inter_token.observe(now - last)
        else:
            self._metrics.first_token.observe(now - last)

    def _abort(self, request_ids: list[int], reason: str) -> None:
        if not request_ids:
            return
        self._client.abort(request_ids)
        self._metrics.aborts.labels(reason).inc(len(request_ids))
        for request_id in request_ids:
            self._forget(request_id)

    def _forget(self, request_id: int) -> None:
        if self._open.pop(request_id, None) is not None:
            self._metrics.running.dec()


def _failure(terminal: Terminal) -> ApiError:
    """Return the error of a sequence that ended without a finish reason."""
    if isinstance(terminal, Failure):
        return from_failure(terminal)
    return ApiError(500, "the engine aborted the request", None, ErrorCode.ENGINE_FAILED.value)
