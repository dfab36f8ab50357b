"""Admission of requests: encode prompts, check limits and set sampling parameters."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from msgspec import Struct, structs

from tandem.frontend.engine.adapters import KnownAdapters
from tandem.frontend.errors import ApiError, PromptTooLongError, malformed, overloaded, unsupported
from tandem.frontend.generation.output_tags import NO_TAGS, OutputTags
from tandem.frontend.generation.stage import Stage
from tandem.frontend.generation.tokenizer import Tokenizer
from tandem.frontend.grammar.builder import Constraint, GrammarBuilder
from tandem.frontend.grammar.tool_calls import CallSyntax
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.limits import RequestLimits
from tandem.frontend.request.options import GenerationOptions
from tandem.frontend.request.prompts import Prompt
from tandem.frontend.request.served_names import ServedNames
from tandem.frontend.request.tools import ToolUse
from tandem.frontend.workers import Workers
from tandem.protocol.codec import pack_floats, pack_ids
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Limits, ModelFacts, Ready
from tandem.protocol.params import MAX_SEED, SamplingParams

MAX_SCORED = 1_048_576
"""Maximum number of log-probabilities of prompt tokens in one response."""
_SEED_BITS = MAX_SEED.bit_length()
MANY_IDS = 2048
"""Number of token ids above which a prompt is checked and packed in a thread."""


class AdmittedPrompt(Struct, frozen=True):
    """Encoded and validated prompt."""

    text: str
    """Text of the prompt; "" for token ids whose text is not needed (`echo`)."""
    ids: list[int]
    packed: bytes
    """`ids` in the format of `Submit.prompt_ids`."""
    max_tokens: int
    """Maximum number of tokens of each output."""


class Admitted(Struct, frozen=True):
    """Validated request that the engine can serve.

    `sampling` is for choice 0 of the first prompt.
    """

    options: GenerationOptions
    model: ModelFacts
    prompts: list[AdmittedPrompt]
    sampling: SamplingParams
    constraint: Constraint | None = None
    """Grammar of all choices; None if unconstrained."""
    stages: tuple[Stage, ...] = ()
    """Stages of the admission, including the rendering of the prompt."""
    tags: OutputTags = NO_TAGS
    """Tags of a chat's output."""
    prediction: bytes = b""
    """Ids of the predicted output, in the format of `Submit.prediction`."""
    adapter: str = ""
    """Name of the adapter that computes the output; "" for the model itself."""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.options.n

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    def prompt_of(self, choice: int) -> AdmittedPrompt:
        """Return the prompt of a choice; choices are numbered prompt by prompt."""
        return self.prompts[choice // self.options.n]


class Admission:
    """Admission of requests.

    It encodes prompts, and checks requests against the served model and the limits of the server.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        workers: Workers,
        grammars: GrammarBuilder,
        max_concurrent: int,
        limits: RequestLimits,
        sampling_defaults: Mapping[str, float],
        names: ServedNames,
        adapters: KnownAdapters,
    ) -> None:
        self._tokenizer = tokenizer
        self._workers = workers
        self._grammars = grammars
        self._max_concurrent = max_concurrent
        self._limits = limits
        self._sampling_defaults = sampling_defaults
        self._names = names
        self._adapters = adapters

    def named(self, name: str | None, model: ModelFacts) -> ModelFacts:
        """Return the model facts for the name in a request.

        The name may be omitted. Raises ApiError 404 for an unknown name.
        """
        return structs.replace(model, name=self._names.resolve(name, model.name, self._adapters))

    async def admit(
        self,
        options: GenerationOptions,
        prompts: Sequence[Prompt],
        ready: Ready,
        *,
        field: str = "prompt",
        add_special_tokens: bool = True,
        with_text: bool = False,
        tool_use: ToolUse | None = None,
        syntax: CallSyntax | None = None,
        tags: OutputTags = NO_TAGS,
        ignored: IgnoredFields | None = None,
        stages: tuple[Stage, ...] = (),
        client: str = "",
    ) -> Admitted:
        """Encode the prompts and check the request.

        Raises ApiError for requests that this server cannot serve. field: request field of the prompts, for errors.
        add_special_tokens: False for a rendered chat, which contains them. with_text: decode prompts given as ids.
        ignored: records parts of a schema that cannot be enforced. syntax: format of tool calls, if tools are used.
        tags: tags that outputs may contain. stages: stages before the admission. client: name of the API key, which has
        a share of the time for grammars.
        """
        model = self.named(options.model, ready.model)
        # Before anything is awaited: one that is unloaded meanwhile is a 404 of the engine, never the model itself.
        adapter = model.name if model.name in self._adapters else ""
        if model.name in self._names.listed(ready.model.name):
            adapter = ""  # An engine may have loaded one of the model's own name.
        self._limits.check(options)
        check_ids(options.stop_token_ids, model.vocab_size, "stop_token_ids")
        check_ids(tuple(options.logit_bias), model.vocab_size, "logit_bias")
        self._check_count(options, len(prompts), ready.limits)
        begun = monotonic()
        admitted: list[AdmittedPrompt] = []
        for prompt in prompts:
            ids = await self._encode(prompt, options, ready, field, add_special_tokens)
            self._limits.check_prompt(len(ids), field)
            max_tokens = _room(len(ids), options, ready)
            _check_length(len(ids), max_tokens, ready, field)
            if options.max_tokens == 0:
                _check_scored_length(len(ids), options, ready, field)
            arguments = (prompt, ids, max_tokens, model.vocab_size, field, with_text)
            few = len(ids) <= MANY_IDS
            admitted.append(self._pack(*arguments) if few else await self._workers.run(self._pack, *arguments))
        _check_scored(options, sum(len(prompt.ids) for prompt in admitted))
        prediction = await self._predicted(options, ready, ignored)
        encoded = monotonic()
        stages += (Stage("tokenize", begun, encoded),)
        try:
            constraint = await self._grammars.build(
                options, tool_use, syntax, tags.thinking, tags.think, ignored, client, model.vocab_size
            )
        except ApiError as error:
            refused = error.renamed(options.constraint_names)
            refused.refusal = "grammar"
            raise refused from None
        if constraint is not None:
            stages += (Stage("grammar", encoded, monotonic()),)
        sampling = _sampling(options, self._sampling_defaults)
        return Admitted(options, model, admitted, sampling, constraint, stages, tags, prediction, adapter)

    def _check_count(self, options: GenerationOptions, prompts: int, limits: Limits) -> None:
        """Raise ApiError 400 for more sequences than this server can ever hold at once.

        A retry would not help.
        """
        wanted = options.n * prompts
        for limit, flags in (
            (min(self._max_concurrent, limits.max_concurrent), "--max-concurrent"),
            (limits.max_rows + limits.max_waiting, "--max-rows and --max-waiting"),
        ):
            if (options.max_tokens or options.prompt_logprobs is not None) and wanted > limit:
                raise unsupported(
                    f"'n' times the number of prompts is {wanted} ({options.n} times {prompts}); "
                    f"this server takes at most {limit} sequences at once ({flags})",
                    "n" if options.n > 1 else "prompt",
                )

    async def _encode(
        self, prompt: Prompt, options: GenerationOptions, ready: Ready, field: str, add_special_tokens: bool
    ) -> list[int]:
        if not isinstance(prompt, str):
            if not prompt:
                raise malformed("a prompt of token ids must hold at least one id", field)
            return prompt
        lower_bound = self._tokenizer.min_tokens(prompt)
        self._limits.check_prompt(lower_bound, field, "at least ")
        _check_length(lower_bound, _room(lower_bound, options, ready), ready, field, "at least ")
        ids = await self._tokenizer.encode(prompt, add_special_tokens)
        if not ids:
            raise malformed("the prompt is empty and the model has no begin token; give at least one character", field)
        return ids

    async def _predicted(self, options: GenerationOptions, ready: Ready, ignored: IgnoredFields | None) -> bytes:
        """Encode the prediction of a request, up to what the engine takes of it; without drafts it is ignored."""
        most = ready.limits.max_prediction
        if not options.prediction:
            return b""
        if not most and ignored is not None:
            ignored.add("prediction")
        if not most or not options.speculation:
            return b""
        ids = (await self._tokenizer.encode(options.prediction, add_special_tokens=False))[:most]
        check_ids(ids, ready.model.vocab_size, "prediction")
        return pack_ids(ids)

    def _pack(
        self, prompt: Prompt, ids: list[int], max_tokens: int, vocab_size: int, field: str, with_text: bool
    ) -> AdmittedPrompt:
        # Ids from the tokenizer are checked too: it may have more ids than the model.
        check_ids(ids, vocab_size, field)
        guard = self._tokenizer.guard
        if isinstance(prompt, str):
            text = prompt if guard is None else guard.unsealed(prompt)
        else:
            if guard is not None:
                guard.check_ids(ids, self._tokenizer.leading_ids, field)
            text = self._tokenizer.decode(ids) if with_text else ""
        return AdmittedPrompt(text, ids, pack_ids(ids), max_tokens)


def check_overload(open_sequences: int, wanted: int, limit: int, retry_after: Callable[[int, int], int]) -> None:
    """Raise ApiError 429 if this frontend would have too many open sequences.

    limit: maximum number of open sequences, including the new request. retry_after: returns the Retry-After, given the
    number that must finish first and the request's own.
    """
    if (excess := open_sequences + wanted - limit) > 0:
        raise overloaded(
            f"{open_sequences} sequences are open and this request asks for {wanted} more; the limit is {limit} "
            "(--max-concurrent); try again later",
            retry_after(excess, wanted),
            "concurrency",
        )


def check_queue(queued: int, wanted: int, limit: int, retry_after: Callable[[int, int], int]) -> None:
    """Raise ApiError 429 if too many prompt tokens would wait in the engine.

    At most `limit` may wait; a request of any length is accepted while none do. retry_after: returns the Retry-After,
    given the number that must leave the queue first and the request's own.
    """
    if queued and (excess := queued + wanted - limit) > 0:
        raise overloaded(
            f"{queued} prompt tokens are waiting and this request has {wanted} more; the limit is {limit} "
            "(--max-queued-tokens); try again later",
            retry_after(min(excess, queued), wanted),
            "queued_tokens",
        )


def _room(prompt_len: int, options: GenerationOptions, ready: Ready) -> int:
    """Return the `max_tokens` of one prompt.

    It is the requested number, or the default limited by the remaining context and KV cache. The KV of the last token
    is never computed.
    """
    if not options.max_tokens_by_default:
        return options.max_tokens
    limit = min(ready.model.max_len, ready.limits.kv_tokens + 1)
    return min(options.max_tokens, max(limit - prompt_len, options.min_tokens, 1))


def check_ids(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Raise ApiError 400 for an id outside the model's vocabulary.

    name: field at fault.
    """
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise unsupported(f"token id {bad} in {name!r} is not between 0 and {vocab_size - 1}", name)


def _check_length(prompt_len: int, max_tokens: int, ready: Ready, field: str, qualifier: str = "") -> None:
    """Raise ApiError 400 for a request that exceeds the context length or the KV cache.

    The context length limits prompt and output together, the KV cache the prompt. The engine checks whether the output
    fits into the cache as well.
    """
    total, max_len, pool = prompt_len + max_tokens, ready.model.max_len, ready.limits.kv_tokens
    if total > max_len:
        raise PromptTooLongError(
            f"This model's maximum context length is {max_len} tokens. However, you requested {qualifier}{total} "
            f"tokens ({qualifier}{prompt_len} in the prompt, {max_tokens} in the completion). Please reduce the length "
            "of the prompt or of the completion.",
            field if prompt_len >= max_len else "max_tokens",
            ErrorCode.CONTEXT_LENGTH,
            prompt_len,
            max_len - max_tokens,
        )
    if prompt_len > pool:
        raise PromptTooLongError(
            f"the prompt has {qualifier}{prompt_len} tokens, this server's KV pool holds {pool} (--kv-tokens); please "
            "reduce the length of the prompt",
            field,
            ErrorCode.KV_CAPACITY,
            prompt_len,
            pool,
        )


def _check_scored_length(prompt_len: int, options: GenerationOptions, ready: Ready, field: str) -> None:
    """Raise ApiError 400 for a prompt without room for the token that the engine generates after it.

    A request that only scores its prompt discards that token.
    """
    most = ready.model.max_len - 1
    if options.prompt_logprobs is not None and prompt_len > most:
        subject = "prompt and continuation have" if options.num_verified else "the prompt has"
        raise PromptTooLongError(
            f"{subject} {prompt_len} tokens, log-probabilities are returned for at most {most}, one less than the "
            "model's context length; please reduce the length",
            field,
            ErrorCode.CONTEXT_LENGTH,
            prompt_len,
            most,
        )


def _check_scored(options: GenerationOptions, prompt_tokens: int) -> None:
    """Raise ApiError 400 for too many log-probabilities of prompt tokens.

    A response reports at most `MAX_SCORED` of them.
    """
    if options.prompt_logprobs is None:
        return
    wanted = (options.num_verified or prompt_tokens) * options.n * (1 + options.prompt_logprobs)
    if wanted > MAX_SCORED:
        name = "prompt_logprobs" if options.returns_prompt_logprobs else "logprobs"
        raise unsupported(
            f"the prompt's log-probabilities would be {wanted} numbers ({prompt_tokens} prompt tokens, {options.n} "
            f"choices each, {1 + options.prompt_logprobs} a token), at most {MAX_SCORED}; lower {name!r} or 'n'",
            name,
        )


def _sampling(options: GenerationOptions, defaults: Mapping[str, float]) -> SamplingParams:
    """Complete the sampling parameters for choice 0.

    Omitted parameters have the model's `defaults`. A random seed is drawn if the request has none.
    """
    return structs.replace(
        options.sampling,
        **{name: value for name, value in defaults.items() if name not in options.given_sampling},
        seed=secrets.randbits(_SEED_BITS) if options.seed is None else options.seed,
        stop_token_ids=pack_ids(options.stop_token_ids),
        logit_bias_ids=pack_ids(tuple(options.logit_bias)),
        logit_bias_values=pack_floats(tuple(options.logit_bias.values())),
    )
