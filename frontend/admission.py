"""From a validated request to what the engine is asked: ids, limits, seeds."""

import secrets
from collections.abc import Sequence

from msgspec import Struct

from frontend.errors import ApiError, malformed, unavailable, unsupported
from frontend.schemas.completion import CompletionRequest
from frontend.schemas.prompts import Prompt
from frontend.tokenizer import Tokenizer
from frontend.workers import Workers
from protocol.codec import pack_floats, pack_ids
from protocol.errors import ErrorCode
from protocol.events import Limits, ModelFacts, Ready
from protocol.params import MAX_SEED, SamplingParams

MANY_IDS = 2048
"""Prompts of more ids are checked and packed in a thread."""


class AdmittedPrompt(Struct, frozen=True):
    """One prompt as the engine gets it, and as text for `echo`."""

    text: str
    ids: list[int]
    packed: bytes
    max_tokens: int


class Admitted(Struct, frozen=True):
    """A request that the engine can be asked for; `sampling` is that of choice 0 of the first prompt."""

    request: CompletionRequest
    model: ModelFacts
    prompts: list[AdmittedPrompt]
    sampling: SamplingParams

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.request.n

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)


async def admit(
    request: CompletionRequest, ready: Ready, tokenizer: Tokenizer, workers: Workers, max_concurrent: int
) -> Admitted:
    """Encodes and checks against the model. Raises ApiError with the numbers."""
    model = ready.model
    if request.model != model.name:
        raise ApiError(
            404,
            f"the model {request.model!r} does not exist; this server has {model.name!r}",
            "model",
            "model_not_found",
        )
    _check_ids(request.stop_token_ids, model.vocab_size, "stop_token_ids")
    _check_ids(tuple(request.logit_bias), model.vocab_size, "logit_bias")
    _check_count(request, ready.limits, max_concurrent)
    prompts: list[AdmittedPrompt] = []
    for prompt in request.prompts:
        prompts.append(await _admit_prompt(prompt, request, model, tokenizer, workers))
    return Admitted(request, model, prompts, _sampling(request))


def _check_count(request: CompletionRequest, limits: Limits, max_concurrent: int) -> None:
    """Raises ApiError 422 for more sequences than there can ever be at once: to try again would not help."""
    wanted = request.n * len(request.prompts)
    for most, flags in (
        (max_concurrent, "--max-concurrent"),
        (limits.max_rows + limits.max_waiting, "--max-rows and --max-waiting"),
    ):
        if request.max_tokens and wanted > most:
            raise unsupported(
                f"'n' times the number of prompts is {wanted} ({request.n} times {len(request.prompts)}); "
                f"this server takes at most {most} sequences at once ({flags})",
                "n" if request.n > 1 else "prompt",
            )


def check_overload(open_sequences: int, wanted: int, most: int) -> None:
    """Raises ApiError 503 where this frontend would hold more than `most` sequences open."""
    if open_sequences + wanted > most:
        raise unavailable(
            f"{open_sequences} sequences are open and {wanted} more were asked for, at most {most} at once "
            "(--max-concurrent); try again later",
            ErrorCode.OVERLOADED,
        )


async def _admit_prompt(
    prompt: Prompt, request: CompletionRequest, model: ModelFacts, tokenizer: Tokenizer, workers: Workers
) -> AdmittedPrompt:
    if isinstance(prompt, str):
        _check_length(
            tokenizer.fewest(prompt), _room(tokenizer.fewest(prompt), request, model), model.max_len, "at least "
        )
        ids = await tokenizer.encode(prompt)
        if not ids:
            raise malformed(
                "the prompt is empty and the model has no begin token; give at least one character", "prompt"
            )
    elif prompt:
        ids = prompt
    else:
        raise malformed("a prompt of token ids must hold at least one id", "prompt")
    max_tokens = _room(len(ids), request, model)
    _check_length(len(ids), max_tokens, model.max_len)

    def finish() -> AdmittedPrompt:
        # A tokenizer, too, may know ids that the model lacks.
        _check_ids(ids, model.vocab_size, "prompt")
        text = prompt if isinstance(prompt, str) else tokenizer.decode(ids) if request.echo else ""
        return AdmittedPrompt(text, ids, pack_ids(ids), max_tokens)

    return finish() if len(ids) <= MANY_IDS else await workers.run(finish)


def _room(prompt_len: int, request: CompletionRequest, model: ModelFacts) -> int:
    """The `max_tokens` of one prompt: what was asked for, or the default as far as the model has room for it."""
    if not request.max_tokens_by_default:
        return request.max_tokens
    return min(request.max_tokens, max(model.max_len - prompt_len, request.min_tokens, 1))


def _check_ids(ids: Sequence[int], vocab_size: int, name: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise unsupported(f"token id {bad} in {name!r} is not between 0 and {vocab_size - 1}", name)


def _check_length(prompt_len: int, max_tokens: int, max_len: int, qualifier: str = "") -> None:
    total = prompt_len + max_tokens
    if total > max_len:
        raise ApiError(
            400,
            f"This model's maximum context length is {max_len} tokens. However, you requested {qualifier}{total} "
            f"tokens ({qualifier}{prompt_len} in the prompt, {max_tokens} in the completion). Please reduce the length "
            "of the prompt or of the completion.",
            "prompt" if prompt_len >= max_len else "max_tokens",
            ErrorCode.CONTEXT_LENGTH.value,
        )


def _sampling(request: CompletionRequest) -> SamplingParams:
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=secrets.randbelow(MAX_SEED + 1) if request.seed is None else request.seed,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        stop_token_ids=pack_ids(request.stop_token_ids),
        logit_bias_ids=pack_ids(tuple(request.logit_bias)),
        logit_bias_values=pack_floats(tuple(request.logit_bias.values())),
    )
