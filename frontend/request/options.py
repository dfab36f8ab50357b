"""Options of a generation.

These are the request fields shared by all generating routes, and their validated values.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Raw, Struct

from tandem.frontend.errors import ApiError, unsupported
from tandem.frontend.request.extra_fields import NO_EFFECT_FIELDS, REFUSED_FIELDS
from tandem.frontend.request.field_types import (
    Boolean,
    FieldType,
    Integer,
    JsonObject,
    Number,
    OneOf,
    Parsed,
    String,
    Strings,
    TokenBiases,
    TokenIds,
    Typed,
    sized,
)
from tandem.frontend.request.fields import IGNORED_FIELDS, Field
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.schema import BOOLEAN, Schema, nullable, opened
from tandem.frontend.request.structured_outputs import (
    CHOICES,
    MAX_PATTERN_CHARS,
    STRUCTURED_FIELDS,
    constraints,
)
from tandem.frontend.request.values import decode_field
from tandem.protocol.commands import MAX_NAME_BYTES, MAX_PRIORITY
from tandem.protocol.params import (
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    SAMPLING_FIELDS,
    SamplingField,
    SamplingParams,
)

MAX_N = 128
MAX_STOPS = 256
UNLIMITED = -1
"""Token limit that allows all the remaining context."""
MAX_STOP_CHARS = 1024
INT32_MAX = 2**31 - 1


class StreamOptions(Struct, frozen=True):
    """The content of `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """With `include_usage`, every chunk has the current usage."""
    include_obfuscation: bool | None = None
    """Padding against attacks on the lengths of encrypted chunks; accepted without effect on the output."""


def _sampling_kind(field: SamplingField) -> FieldType:
    """Return the type of a sampling field.

    An absent one is None: the served model's default applies.
    """
    if field.name == "top_p":
        # 0 keeps only the most probable token.
        return Number(0, field.maximum)
    if not field.is_integer:
        return Number(field.minimum, field.maximum, above_minimum=field.above_minimum)
    # Clients also use -1 to keep all tokens.
    minimum = -1 if field.name == "top_k" else int(field.minimum)
    return Integer(minimum, int(field.maximum))


_RESPONSE_FORMAT: Schema = nullable(
    opened({"type": {"enum": ["text", "json_object"]}}),
    opened({"type": {"const": "json_schema"}, "schema": {"type": "object"}}),
    opened(
        {
            "type": {"const": "json_schema"},
            "json_schema": opened(
                {"schema": {"type": "object"}},
                {
                    "name": {"type": "string", "minLength": 1},
                    "description": {"type": ["string", "null"]},
                    "strict": BOOLEAN,
                },
            ),
        }
    ),
)
_RESPONSE_FORMAT_NAMES = frozenset(("type", "json_schema"))
_JSON_SCHEMA_NAMES = frozenset(("name", "description", "schema", "strict"))


def _read_response_format(raw: Raw, ignored: IgnoredFields) -> dict[str, Any]:
    """Parse `response_format`; its schema and type are checked with the grammar.

    Servers like llama.cpp have the schema next to the type. A schema needs no name here.
    """
    name = "response_format"
    given = JsonObject().check(name, decode_field(sized(name, raw), name))
    if given.get("type") in ("json_object", "json_schema") and isinstance(given.get("schema"), dict):
        given = {"json_schema": {"schema": given["schema"]}, **given, "type": "json_schema"}
        del given["schema"]
    schema = given.get("json_schema")
    if isinstance(schema, dict):
        schema = {"name": "answer", **_known(schema, _JSON_SCHEMA_NAMES, f"{name}.json_schema", ignored)}
    known = _known(given, _RESPONSE_FORMAT_NAMES, name, ignored)
    return known if schema is None else {**known, "json_schema": schema}


def _known(given: dict[str, Any], names: frozenset[str], path: str, ignored: IgnoredFields) -> dict[str, Any]:
    """Return the fields of these names.

    The others are recorded as ignored, unless they are null.
    """
    for name, value in given.items():
        if name not in names and value is not None:
            ignored.add(f"{path}.{name}")
    return {name: value for name, value in given.items() if name in names}


_SAMPLING = tuple(Field(field.name, _sampling_kind(field), field.text) for field in SAMPLING_FIELDS)
_REPETITION = next(field for field in _SAMPLING if field.name == "repetition_penalty")
_SEED = Field("seed", Integer(-1, MAX_SEED), "Seed of sampling; the same seed gives the same answer, -1 a random one.")

OPTION_FIELDS = (
    Field("model", String(), "A name of the served model, which is also meant where there is none."),
    Field("n", Integer(1, MAX_N, 1), "Number of choices for each prompt."),
    Field("stream", Boolean(), "Send the output as server-sent events while it is generated."),
    Field("stream_format", OneOf(("events",)), "Send one event a token, in a format of this server."),
    Field("stream_options", Typed(StreamOptions), "Options of a stream: a final chunk with the usage."),
    Field("min_tokens", Integer(0, INT32_MAX, 0), "No end of sequence before this many tokens."),
    *_SAMPLING,
    Field(
        "repeat_penalty", _REPETITION.type, "Another name of `repetition_penalty`, which counts the whole text here."
    ),
    _SEED,
    Field(
        "stop",
        Strings(MAX_STOPS, MAX_STOP_CHARS, drop_empty=True),
        "Strings that end the output. In reasoning, only those that contain its closing tag do.",
    ),
    Field("stop_token_ids", TokenIds(MAX_STOP_TOKEN_IDS), "Token ids that end the output."),
    Field("include_stop_str_in_output", Boolean(), "Include the stop string or token that ended the output."),
    Field("ignore_eos", Boolean(), "Continue after the model's end-of-sequence token."),
    Field("skip_special_tokens", Boolean(True), "Leave special tokens out of the text."),
    Field("logit_bias", TokenBiases(MAX_LOGIT_BIAS), "Biases added to the logits of token ids."),
    Field("return_token_ids", Boolean(), "Return the token ids of prompt and output."),
    Field("return_tokens_as_token_ids", Boolean(), "Name tokens in log-probabilities by their ids, as `token_id:9`."),
    Field(
        "prompt_logprobs",
        Integer(0, MAX_TOP_LOGPROBS),
        "Return the log-probability of each token of the prompt, with this number of alternatives; not streamed.",
    ),
    Field(
        "response_format",
        Parsed(_read_response_format, _RESPONSE_FORMAT),
        "Constrain the output to JSON, or to a JSON Schema.",
    ),
    Field("regex", String(MAX_PATTERN_CHARS), "Constrain the output to a regular expression."),
    Field("choice", CHOICES, "Constrain the output to one of these texts."),
    Field("grammar", String(MAX_PATTERN_CHARS), "Constrain the output to a Lark grammar in llguidance's dialect."),
    *STRUCTURED_FIELDS,
    Field(
        "priority",
        Integer(-MAX_PRIORITY, MAX_PRIORITY, 0),
        "Higher is more urgent; under any policy low priorities are preempted first, and under the policy `priority` "
        "high ones are served first.",
    ),
    Field("speculation", Boolean(True), "Verify drafts for this request where the server does (`--speculate`)."),
    Field(
        "session_id",
        String(MAX_NAME_BYTES, MAX_NAME_BYTES, "", one_line=True),
        "Keeps the KV cache of this conversation for its next turn. One sequence and one turn at a time.",
    ),
    Field(
        "cache_salt",
        String(MAX_NAME_BYTES, MAX_NAME_BYTES, ""),
        "The cached KV of prompts is shared only among requests of the same salt.",
    ),
    *NO_EFFECT_FIELDS,
    *REFUSED_FIELDS,
    *IGNORED_FIELDS,
)
"""Fields of all generating routes. A route adds its own, and may lack or replace some."""

FLAG_FIELDS = (Field("max_tokens", Integer(1, INT32_MAX), "Maximum number of tokens of the answer."), *_SAMPLING, _SEED)
"""Fields that the command line offers as flags."""


class GenerationOptions(Struct, frozen=True, kw_only=True):
    """Validated options of a generation.

    Admission checks the rest, which depends on the model: vocabulary and lengths.
    """

    model: str | None
    """Name of the model; None for the served one."""
    n: int = 1
    stream: bool
    include_usage: bool
    continuous_usage: bool = False
    """True if every chunk of a stream has the current usage."""
    stream_events: bool = False
    """True for one event per token, in this server's own format, instead of OpenAI's chunks."""
    return_token_ids: bool = False
    max_tokens: int
    max_tokens_by_default: bool
    """True if `max_tokens` is a default, which is lowered to what the context and the KV cache allow."""
    min_tokens: int
    sampling: SamplingParams
    """Sampling parameters; admission adds the seed, stop tokens, biases and the model's defaults."""
    given_sampling: frozenset[str] = frozenset()
    """Names of the sampling parameters set by the request; the others have the model's defaults."""
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop: bool
    """True to include the matched stop string or token in the text."""
    ignore_eos: bool
    skip_special_tokens: bool
    logit_bias: dict[int, float]
    logprobs: int | None
    """Number of alternatives reported per token; None for no log-probabilities."""
    prompt_logprobs: int | None = None
    """Number of alternatives reported per prompt token; None for no log-probabilities."""
    returns_prompt_logprobs: bool = False
    """True to report them apart from those of the output, not only with an echoed prompt."""
    return_tokens_as_token_ids: bool = False
    """True to name tokens in log-probabilities by their ids."""
    num_verified: int = 0
    """Number of tokens at the end of the prompt that `prompt_logprobs` applies to; 0 for all."""
    logits: bool = False
    """True to report the logits of verified tokens."""
    num_returned: int | None = None
    """Number of choices to return of the `n` generated, those with the highest mean log-probability (`best_of`); None
    for all."""
    response_format: dict[str, Any] | None = None
    regex: str | None
    choice: tuple[str, ...]
    grammar: str | None
    constraint_names: dict[str, str] = {}
    """Maps a constraint's field to the request field that it comes from."""
    priority: int
    """Scheduling priority; higher is more urgent."""
    session_id: str
    """Session whose KV cache is kept for the next turn; "" for none."""
    cache_salt: str
    """Salt of the prefix cache, which is shared only among requests with the same salt."""
    speculation: bool = True
    """False to verify no drafts for the request."""
    prediction: str | None = None
    """Text that the output probably repeats, which drafts are taken from."""


_SAME_NAME = GenerationOptions.__struct_fields__


def generation_options(
    values: Mapping[str, Any],
    max_tokens: int | None,
    default_max_tokens: int | None,
    logprobs: int | None,
    ignored: IgnoredFields,
) -> GenerationOptions:
    """Build the options from the parsed fields of a body.

    `max_tokens`, which may be UNLIMITED, and `logprobs` come from fields that each route names differently.
    `default_max_tokens` is the default of `max_tokens`; None for the rest of the context. Raises ApiError 400 for
    conflicting fields.
    """
    has_limit = max_tokens not in (None, UNLIMITED)
    length = default_max_tokens if max_tokens is None else max_tokens
    if length is None or length == UNLIMITED:
        length = INT32_MAX
    if values["min_tokens"] > length:
        raise unsupported(f"{{param}} must be between 0 and {length}, not {values['min_tokens']}", "min_tokens")
    if values.get("stream_format") is not None and not values["stream"]:
        raise unsupported("{param} needs 'stream': true", "stream_format")
    if values["prompt_logprobs"] is not None and values["stream"]:
        raise unsupported("{param} cannot be streamed; leave 'stream' out", "prompt_logprobs")
    stream_options: StreamOptions = values["stream_options"] or StreamOptions()
    if values["stream_options"] is not None and not values["stream"]:
        ignored.add("stream_options")
    constrained, given = constraints(values), _given_numbers(values)
    own = {
        "constraint_names": constrained.names,
        "max_tokens": length,
        "max_tokens_by_default": not has_limit,
        "logprobs": logprobs,
        "returns_prompt_logprobs": values["prompt_logprobs"] is not None,
        "stream_events": values.get("stream_format") is not None,
        "include_usage": bool(stream_options.include_usage),
        "continuous_usage": bool(stream_options.include_usage and stream_options.continuous_usage_stats),
        "seed": None if values["seed"] == -1 else values["seed"],
        "include_stop": values["include_stop_str_in_output"],
        "sampling": _sampling_params(values, given, length),
        "given_sampling": frozenset(given),
    }
    shared = {name: values[name] for name in _SAME_NAME if name in values and name not in own}
    options = GenerationOptions(**{**shared, **constrained.values}, **own)
    _check_events(options)
    if options.session_id and options.n > 1:
        raise rejected_with_session("n")
    return options


def _given_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numeric sampling parameters set by a request."""
    given = {field.name: values[field.name] for field in SAMPLING_FIELDS if values[field.name] is not None}
    if values["repeat_penalty"] is not None:
        given.setdefault("repetition_penalty", values["repeat_penalty"])
    if "top_k" in given:
        given["top_k"] = max(given["top_k"], 0)
    if given.get("top_p") == 0:
        given |= {"temperature": 0.0, "top_p": 1.0}
    return given


def _sampling_params(values: Mapping[str, Any], given: Mapping[str, Any], max_tokens: int) -> SamplingParams:
    numbers: dict[str, Any] = {field.name: given.get(field.name, field.neutral) for field in SAMPLING_FIELDS}
    numbers["top_k"] = int(numbers["top_k"])
    return SamplingParams(max_tokens, min_tokens=values["min_tokens"], ignore_eos=values["ignore_eos"], **numbers)


def _check_events(options: GenerationOptions) -> None:
    """Reject options that a stream of events does not support.

    Token events only have text and id.
    """
    if not options.stream_events:
        return
    rejected = {
        "n": options.n > 1,
        "logprobs": options.logprobs is not None,
        "return_token_ids": options.return_token_ids,
    }
    for name, is_given in rejected.items():
        if is_given:
            raise rejected_with_events(name)


def rejected_with_events(name: str) -> ApiError:
    """Return the 400 for a field that cannot be combined with a stream of events."""
    return unsupported("{param} cannot be combined with 'stream_format': \"events\"; leave one of them out", name)


def rejected_with_session(name: str) -> ApiError:
    """Return the 400 for a field that requests several sequences of a session.

    A session has one sequence per turn.
    """
    return unsupported("'session_id' takes one sequence at a time; {param} asks for more", name)
