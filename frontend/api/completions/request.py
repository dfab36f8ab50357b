"""The body of `POST /v1/completions`."""

from typing import Any

from msgspec import Struct, structs

from tandem.frontend.errors import unsupported
from tandem.frontend.request.fields import BodyFormat, FieldReader
from tandem.frontend.request.options import (
    COMPLETION_MAX_TOKENS,
    INT32_MAX,
    MAX_N,
    MAX_TOP_LOGPROBS,
    OPTION_NAMES,
    GenerationOptions,
    optional_integer,
    read_options,
    refused_with_events,
    refused_with_session,
)
from tandem.frontend.request.prompts import Prompt, parse_prompts

MAX_SEQUENCES = 256
"""Most prompts times choices of one request."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {"suffix": ("",), "add_special_tokens": (True,)}


class CompletionRequest(Struct, frozen=True):
    """A validated request."""

    options: GenerationOptions
    prompts: list[Prompt]
    echo: bool


# Names of the request that no body may have are refused in the end, as nobody takes them.
_BODY = BodyFormat((*OPTION_NAMES, *_NEUTRAL, "prompt", "echo", "best_of"))


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises ApiError 400 for what is malformed, 422 for what is out of range or not supported."""
    fields = FieldReader(_BODY.split(body))
    fields.neutral(_NEUTRAL)
    echo = fields.boolean("echo", False)
    # Without echo there would be nothing to answer with.
    max_tokens = optional_integer(fields, "max_tokens", 0 if echo else 1, INT32_MAX)
    logprobs = optional_integer(fields, "logprobs", 0, MAX_TOP_LOGPROBS)
    options = read_options(fields, max_tokens, COMPLETION_MAX_TOKENS, logprobs)
    options = _best_of(fields, structs.replace(options, prompt_logprobs=logprobs if echo else None))
    prompts = parse_prompts(fields.raw("prompt"))
    if (wanted := options.n * len(prompts)) > MAX_SEQUENCES:
        name = "n" if options.keep is None else "best_of"
        raise unsupported(f"{name!r} times the number of prompts is {wanted}, at most {MAX_SEQUENCES}", name)
    if options.stream_events and (echo or wanted > 1):
        raise refused_with_events("echo" if echo else "prompt")
    if options.session_id and wanted > 1:
        raise refused_with_session("best_of" if options.n > 1 else "prompt")
    if options.session_id and options.max_tokens == 0 and options.prompt_logprobs is None:
        raise unsupported(
            "'session_id' keeps what is computed for a prompt, and with 'echo' and 'max_tokens' 0 nothing is; ask for "
            "'logprobs' or raise 'max_tokens', or leave 'session_id' out",
            "session_id",
        )
    fields.finish()
    return CompletionRequest(options, prompts, echo)


def _best_of(fields: FieldReader, options: GenerationOptions) -> GenerationOptions:
    """The options with as many choices as are to be generated, and how many of them are shown."""
    best_of = fields.integer("best_of", options.n, 1, MAX_N)
    if best_of == options.n:
        return options
    if best_of < options.n:
        raise unsupported(f"'best_of' ({best_of}) must be at least 'n' ({options.n})", "best_of")
    if options.stream:
        raise unsupported("'best_of' cannot be streamed: all choices have to end first; leave 'stream' out", "best_of")
    return structs.replace(options, n=best_of, keep=options.n)
