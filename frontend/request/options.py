"""What every request to generate may ask for, whatever its shape: one place reads these fields for all routes."""

from typing import Any

import msgspec
from msgspec import Raw, Struct

from tandem.frontend.errors import ApiError, unsupported
from tandem.frontend.request.fields import FieldReader, wrong_type
from tandem.protocol.commands import MAX_NAME_BYTES, MAX_PRIORITY
from tandem.protocol.params import MAX_LOGIT_BIAS, MAX_SEED, MAX_STOP_TOKEN_IDS

COMPLETION_MAX_TOKENS = 16
"""Tokens that a completion without `max_tokens` may have, as at OpenAI."""
MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 1024
"""Most alternatives of `choice`."""
MAX_PATTERN_CHARS = 64 * 1024
INT32_MAX = 2**31 - 1

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
}
"""Fields that are not supported, with the values that change nothing and are therefore accepted."""


class GenerationOptions(Struct, frozen=True, kw_only=True):
    """How to generate, validated. What depends on the model (vocabulary, lengths) is checked at admission."""

    model: str
    n: int
    stream: bool
    include_usage: bool
    stream_events: bool = False
    """Whether the stream has an event for each token, in this server's own form, instead of OpenAI's chunks."""
    return_token_ids: bool
    max_tokens: int
    max_tokens_by_default: bool
    """Nobody asked for so many: where the model has room for fewer, it is fewer."""
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop: bool
    """Whether what ended the text, a stop string or token, is part of it."""
    ignore_eos: bool
    skip_special_tokens: bool
    logit_bias: dict[int, float]
    logprobs: int | None
    """How many alternatives are reported with the log-probability of each token; None for no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, which are echoed with them."""
    keep: int | None = None
    """How many of a prompt's `n` choices are shown, those with the highest mean log-probability (`best_of`); None for
    all."""
    response_format: dict[str, Any] | None
    regex: str | None
    choice: tuple[str, ...]
    grammar: str | None
    priority: int
    """Higher is more urgent."""
    session_id: str
    """Conversation whose KV stays for its next turn; "" for none."""
    cache_salt: str
    """Cached KV is shared among requests of the same salt alone."""


OPTION_NAMES = (
    *GenerationOptions.__struct_fields__, *NEUTRAL, "stream_options", "stream_format", "include_stop_str_in_output",
)  # fmt: skip
"""Names that a body may have for the sake of these options. Those of the struct alone are refused, as nobody takes
them."""


def read_options(
    fields: FieldReader, max_tokens: int | None, default_max_tokens: int, logprobs: int | None
) -> GenerationOptions:
    """Takes the fields that all routes share; the arguments are what each route names in its own way.

    Raises ApiError 400 for what is malformed, 422 for what is out of range or not supported.
    """
    fields.neutral(NEUTRAL)
    stream = fields.boolean("stream", False)
    most = default_max_tokens if max_tokens is None else max_tokens
    options = GenerationOptions(
        model=fields.required_text("model"),
        n=fields.integer("n", 1, 1, MAX_N),
        stream=stream,
        stream_events=_stream_events(fields, stream),
        include_usage=_include_usage(fields, stream),
        return_token_ids=fields.boolean("return_token_ids", False),
        max_tokens=most,
        max_tokens_by_default=max_tokens is None,
        min_tokens=fields.integer("min_tokens", 0, 0, most),
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=fields.number("top_p", 1.0, 0.0, 1.0, above_low=True),
        top_k=max(0, fields.integer("top_k", 0, -1, INT32_MAX)),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.0, 10.0, above_low=True),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        seed=_seed(fields),
        stop=fields.texts("stop", MAX_STOPS, MAX_STOP_CHARS),
        stop_token_ids=fields.ids("stop_token_ids", MAX_STOP_TOKEN_IDS),
        include_stop=fields.boolean("include_stop_str_in_output", False),
        ignore_eos=fields.boolean("ignore_eos", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        logit_bias=fields.biases("logit_bias", MAX_LOGIT_BIAS),
        logprobs=logprobs,
        response_format=fields.object("response_format"),
        regex=fields.text("regex", MAX_PATTERN_CHARS),
        choice=fields.texts("choice", MAX_CHOICES, MAX_STOP_CHARS),
        grammar=fields.text("grammar", MAX_PATTERN_CHARS),
        priority=fields.integer("priority", 0, -MAX_PRIORITY, MAX_PRIORITY),
        session_id=_name(fields, "session_id"),
        cache_salt=_name(fields, "cache_salt"),
    )
    _check_events(options)
    if options.session_id and options.n > 1:
        raise refused_with_session("n")
    return options


def optional_integer(fields: FieldReader, name: str, low: int, high: int) -> int | None:
    """An integer in bounds, or None where the field is absent or null."""
    value = fields.integer(name, low - 1, low, high)
    return None if value < low else value


def _name(fields: FieldReader, field: str) -> str:
    value = fields.text(field, MAX_NAME_BYTES) or ""
    if (size := len(value.encode())) > MAX_NAME_BYTES:
        raise unsupported(f"{field!r} has {size} bytes in UTF-8, at most {MAX_NAME_BYTES}", field)
    return value


def _seed(fields: FieldReader) -> int | None:
    return optional_integer(fields, "seed", 0, MAX_SEED)


def _stream_events(fields: FieldReader, stream: bool) -> bool:
    value = fields.take("stream_format")
    if value is None:
        return False
    if not isinstance(value, str):
        raise wrong_type("stream_format", "a string", value)
    if value != "events":
        raise unsupported(f"'stream_format' must be 'events' or absent, not {value[:40]!r}", "stream_format")
    if not stream:
        raise unsupported("'stream_format' needs 'stream': true", "stream_format")
    return True


def _check_events(options: GenerationOptions) -> None:
    """An event for a token has room for its text and id alone, and says of no choice which one it is."""
    if not options.stream_events:
        return
    beside = {
        "n": options.n > 1,
        "logprobs": options.logprobs is not None,
        "return_token_ids": options.return_token_ids,
    }
    for name, given in beside.items():
        if given:
            raise refused_with_events(name)


def refused_with_events(name: str) -> ApiError:
    """422 for a field that a stream of events has no place for."""
    return unsupported(f"{name!r} cannot be combined with 'stream_format': \"events\"; leave one of them out", name)


def refused_with_session(name: str) -> ApiError:
    """422 for a field that asks for more than the one sequence that a turn of a session is."""
    return unsupported(f"'session_id' takes one sequence at a time; {name!r} asks for more", name)


def _include_usage(fields: FieldReader, stream: bool) -> bool:
    options = fields.take("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise wrong_type("stream_options", "an object", options)
    if not stream:
        raise unsupported("'stream_options' needs 'stream': true", "stream_options")
    inner = FieldReader({name: Raw(msgspec.json.encode(value)) for name, value in options.items()})
    # Padding against guesses from the lengths of encrypted chunks: the output itself does not change.
    inner.boolean("include_obfuscation", False)
    include = inner.boolean("include_usage", False)
    inner.finish()
    return include
