"""The body of `POST /v1/completions`."""

from typing import Any

import msgspec
from msgspec import Raw, Struct

from frontend.errors import unsupported
from frontend.schemas.common import BodyFormat, FieldReader, wrong_type
from frontend.schemas.prompts import Prompt, parse_prompts
from protocol.params import MAX_LOGIT_BIAS, MAX_SEED, MAX_STOP_TOKEN_IDS

MAX_N = 128
MAX_SEQUENCES = 256
"""Most prompts times choices of one request."""
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
DEFAULT_MAX_TOKENS = 16
_INT32_MAX = 2**31 - 1

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
    max_tokens_by_default: bool
    """Nobody asked for so many: where the model has room for fewer, it is fewer."""
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


# Names of the request that no body may have are refused in the end, as nobody takes them.
_BODY = BodyFormat((*CompletionRequest.__struct_fields__, *_NEUTRAL, "prompt", "best_of", "stream_options"))


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises ApiError 400 for what is malformed, 422 for what is out of range or not supported."""
    fields = FieldReader(_BODY.split(body))
    fields.neutral(_NEUTRAL)
    model = fields.required_text("model")
    prompts = parse_prompts(fields.raw("prompt"))
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
        max_tokens_by_default=fields.take("max_tokens") is None,
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
    inner = FieldReader({name: Raw(msgspec.json.encode(value)) for name, value in options.items()})
    inner.neutral({"include_obfuscation": (False,)})
    include = inner.boolean("include_usage", False)
    inner.finish()
    return include
