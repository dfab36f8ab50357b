"""The body of `POST /v1/completions`."""

from typing import Any

import msgspec
from msgspec import Struct

from frontend.errors import malformed, unsupported
from frontend.schemas.common import FieldReader, parse_object, type_name, wrong_type
from protocol.params import MAX_LOGIT_BIAS, MAX_SEED, MAX_STOP_TOKEN_IDS

MAX_N = 128
MAX_PROMPTS = 256
MAX_SEQUENCES = 256
"""Most prompts times choices of one request."""
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
DEFAULT_MAX_TOKENS = 16
_INT32_MAX = 2**31 - 1

Prompt = str | list[int]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "logprobs": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    "priority": (0,),
}


class CompletionRequest(Struct, frozen=True):
    """A validated request. What depends on the model (vocabulary, lengths) is checked at admission."""

    model: str
    prompts: list[Prompt]
    max_tokens: int
    n: int
    stream: bool
    include_usage: bool
    echo: bool
    return_token_ids: bool
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
    min_tokens: int
    ignore_eos: bool
    logit_bias: dict[int, float]


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises ApiError 400 for what is malformed, 422 for what is out of range or not supported."""
    fields = FieldReader(parse_object(body))
    fields.neutral(_NEUTRAL)
    model = fields.required_text("model")
    prompts = _prompts(fields)
    n = fields.integer("n", 1, 1, MAX_N)
    best_of = fields.integer("best_of", n, 1, MAX_N)
    if best_of not in (1, n):
        raise unsupported(f"'best_of' must equal 'n' ({n}) or be left out, not {best_of}", "best_of")
    if n * len(prompts) > MAX_SEQUENCES:
        raise unsupported(f"'n' times the number of prompts is {n * len(prompts)}, at most {MAX_SEQUENCES}", "n")
    echo = fields.boolean("echo", False)
    # Without echo there would be nothing to answer with.
    max_tokens = fields.integer("max_tokens", DEFAULT_MAX_TOKENS, 0 if echo else 1, _INT32_MAX)
    stream = fields.boolean("stream", False)
    request = CompletionRequest(
        model=model,
        prompts=prompts,
        max_tokens=max_tokens,
        n=n,
        stream=stream,
        include_usage=_include_usage(fields, stream),
        echo=echo,
        return_token_ids=fields.boolean("return_token_ids", False),
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=fields.number("top_p", 1.0, 0.0, 1.0, above_low=True),
        top_k=max(0, fields.integer("top_k", 0, -1, _INT32_MAX)),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.0, 10.0, above_low=True),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        seed=_seed(fields),
        stop=fields.texts("stop", MAX_STOPS, MAX_STOP_CHARS),
        stop_token_ids=fields.ids("stop_token_ids", MAX_STOP_TOKEN_IDS),
        min_tokens=fields.integer("min_tokens", 0, 0, max_tokens),
        ignore_eos=fields.boolean("ignore_eos", False),
        logit_bias=fields.biases("logit_bias", MAX_LOGIT_BIAS),
    )
    fields.finish()
    return request


def _seed(fields: FieldReader) -> int | None:
    seed = fields.integer("seed", -1, 0, MAX_SEED)
    return None if seed < 0 else seed


def _include_usage(fields: FieldReader, stream: bool) -> bool:
    options = fields.take("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise wrong_type("stream_options", "an object", options)
    if not stream:
        raise unsupported("'stream_options' needs 'stream': true", "stream_options")
    inner = FieldReader(options)
    inner.neutral({"include_obfuscation": (False,)})
    include = inner.boolean("include_usage", False)
    inner.finish()
    return include


def _prompts(fields: FieldReader) -> list[Prompt]:
    """The four shapes a prompt may have, as a list."""
    value = fields.take("prompt")
    if value is None:
        raise malformed("the field 'prompt' is required", "prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise malformed(
            f"'prompt' must be a string, an array of strings, of token ids, or of token-id arrays, "
            f"not {type_name(value)}",
            "prompt",
        )
    if not value:
        raise malformed("'prompt' is an empty array; give at least one prompt or token id", "prompt")
    try:
        if isinstance(value[0], int):
            return [msgspec.convert(value, list[int])]
        if len(value) > MAX_PROMPTS:
            raise unsupported(f"'prompt' takes at most {MAX_PROMPTS} prompts, not {len(value)}", "prompt")
        if isinstance(value[0], list):
            return list(msgspec.convert(value, list[list[int]]))
        return list(msgspec.convert(value, list[str]))
    except msgspec.ValidationError as error:
        raise malformed(
            f"'prompt' must be a string, an array of strings, of token ids, or of token-id arrays: {error}", "prompt"
        ) from None
