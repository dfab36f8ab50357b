"""The body of `POST /v1/completions`."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs

from tandem.frontend.errors import unsupported
from tandem.frontend.request.field_types import Boolean, Integer, Parsed, Unsupported
from tandem.frontend.request.fields import BodyFormat, Field
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.options import (
    INT32_MAX,
    MAX_N,
    OPTION_FIELDS,
    UNLIMITED,
    GenerationOptions,
    generation_options,
    rejected_with_events,
    rejected_with_session,
)
from tandem.frontend.request.prompts import PROMPTS, Prompt, parse_prompts
from tandem.protocol.params import MAX_TOP_LOGPROBS

MAX_SEQUENCES = 256
"""Maximum number of prompts times choices of a request."""
DEFAULT_MAX_TOKENS = 16

BODY = BodyFormat(
    (
        *OPTION_FIELDS,
        Field("prompt", Parsed(parse_prompts, PROMPTS), "The prompts to continue.", required=True),
        Field(
            "max_tokens",
            Integer(UNLIMITED, INT32_MAX),
            "Most tokens of a choice; -1 for no limit.",
            extra={"default": DEFAULT_MAX_TOKENS},
        ),
        Field("logprobs", Integer(0, MAX_TOP_LOGPROBS), "Number of alternatives reported with each token."),
        Field("best_of", Integer(1, MAX_N), "Number of choices to generate; the best `n` are returned."),
        Field("echo", Boolean(), "Repeat the prompt ahead of each choice."),
        Field("suffix", Unsupported(("",)), "The model continues a text; it does not fill a gap."),
        Field("add_special_tokens", Boolean(True), "Begin a prompt of text with the model's begin token."),
    )
)


class CompletionRequest(Struct, frozen=True):
    """Validated request to `/v1/completions`."""

    options: GenerationOptions
    prompts: list[Prompt]
    echo: bool
    add_special_tokens: bool = True
    """True to prepend the model's BOS token to text prompts."""


def parse_completion(body: bytes, ignored: IgnoredFields) -> CompletionRequest:
    """Parse the body of `/v1/completions`.

    Raises ApiError 400 if it is malformed, and for a value out of range or not supported.
    """
    values = BODY.read(body, ignored)
    echo, max_tokens, logprobs = values["echo"], values["max_tokens"], values["logprobs"]
    if max_tokens == 0 and not echo:
        raise unsupported(f"{{param}} must be between 1 and {INT32_MAX} without 'echo', not 0", "max_tokens")
    options = generation_options(values, max_tokens, DEFAULT_MAX_TOKENS, logprobs, ignored)
    if echo and logprobs is not None and options.prompt_logprobs is None:
        options = structs.replace(options, prompt_logprobs=logprobs)
    options = _best_of(values, options)
    prompts = values["prompt"]
    _check_sequences(options, echo, options.n * len(prompts))
    return CompletionRequest(options, prompts, echo, values["add_special_tokens"])


def _check_sequences(options: GenerationOptions, echo: bool, num_sequences: int) -> None:
    if num_sequences > MAX_SEQUENCES:
        name = "n" if options.num_returned is None else "best_of"
        raise unsupported(
            f"{{param}} times the number of prompts is {num_sequences}; at most {MAX_SEQUENCES} are allowed", name
        )
    if options.stream_events and (echo or num_sequences > 1):
        raise rejected_with_events("echo" if echo else "prompt")
    if options.session_id and num_sequences > 1:
        raise rejected_with_session("best_of" if options.n > 1 else "prompt")
    if options.session_id and options.max_tokens == 0 and options.prompt_logprobs is None:
        raise unsupported(
            "{param} keeps what is computed for a prompt, and with 'echo' and 'max_tokens' 0 nothing is; ask for "
            "'logprobs', raise 'max_tokens', or leave 'session_id' out",
            "session_id",
        )


def _best_of(values: Mapping[str, Any], options: GenerationOptions) -> GenerationOptions:
    """Set the numbers of generated and of returned choices."""
    best_of = values["best_of"]
    if best_of is None or best_of == options.n:
        return options
    if best_of < options.n:
        raise unsupported(f"{{param}} ({best_of}) must be at least 'n' ({options.n})", "best_of")
    if options.stream:
        raise unsupported(
            "{param} cannot be streamed, since all choices have to end first; leave 'stream' out", "best_of"
        )
    return structs.replace(options, n=best_of, num_returned=options.n)
