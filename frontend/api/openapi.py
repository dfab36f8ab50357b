"""What `/openapi.json` says of the bodies that generate, from the same bounds that they are read with."""

from collections.abc import Mapping
from typing import Any

from tandem.frontend.request.conversation import REASONING_EFFORTS
from tandem.frontend.request.messages import MAX_MESSAGES
from tandem.frontend.request.options import (
    COMPLETION_MAX_TOKENS,
    INT32_MAX,
    MAX_CHOICES,
    MAX_N,
    MAX_PATTERN_CHARS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
)
from tandem.frontend.request.prompts import MAX_PROMPTS
from tandem.frontend.request.tools import MAX_NAME_CHARS, MAX_TOOLS
from tandem.protocol.commands import MAX_NAME_BYTES, MAX_PRIORITY
from tandem.protocol.params import MAX_LOGIT_BIAS, MAX_SEED, MAX_STOP_TOKEN_IDS

Schema = dict[str, Any]

ANY: Schema = {}
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": ["boolean", "null"]}
ID: Schema = {"type": "integer", "minimum": 0}


def integer(low: int, high: int, **more: Any) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high, **more}


def number(low: float, high: float, default: float, above_low: bool = False) -> Schema:
    lowest = "exclusiveMinimum" if above_low else "minimum"
    return {"type": ["number", "null"], lowest: low, "maximum": high, "default": default}


def text(longest: int) -> Schema:
    return {"type": ["string", "null"], "minLength": 1, "maxLength": longest}


def constant(*values: Any) -> Schema:
    return {"enum": [*values, None]}


def array(items: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def closed(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object with these fields and no others."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def one_of(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas, {"type": "null"}]}


def _texts(most: int) -> Schema:
    item = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    return one_of(item, array(item, most))


_JSON_SCHEMA = closed(
    {"name": {"type": "string", "minLength": 1}, "schema": {"type": "object"}},
    {"description": {"type": ["string", "null"]}, "strict": BOOLEAN},
)

OPTIONS: dict[str, Schema] = {
    "n": integer(1, MAX_N, default=1),
    "stream": BOOLEAN,
    "stream_format": constant("events"),
    "stream_options": one_of(closed({}, {"include_usage": BOOLEAN, "include_obfuscation": BOOLEAN})),
    "min_tokens": integer(0, INT32_MAX, default=0),
    "temperature": number(0, 2, 1),
    "top_p": number(0, 1, 1, above_low=True),
    "top_k": integer(-1, INT32_MAX, default=0),
    "min_p": number(0, 1, 0),
    "repetition_penalty": number(0, 10, 1, above_low=True),
    "presence_penalty": number(-2, 2, 0),
    "frequency_penalty": number(-2, 2, 0),
    "seed": integer(0, MAX_SEED),
    "stop": _texts(MAX_STOPS),
    "stop_token_ids": one_of(array(ID, MAX_STOP_TOKEN_IDS)),
    "include_stop_str_in_output": BOOLEAN,
    "ignore_eos": BOOLEAN,
    "skip_special_tokens": BOOLEAN,
    "logit_bias": one_of(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
    "return_token_ids": BOOLEAN,
    "response_format": one_of(
        closed({"type": {"enum": ["text", "json_object"]}}),
        closed({"type": {"const": "json_schema"}, "json_schema": _JSON_SCHEMA}),
    ),
    "regex": text(MAX_PATTERN_CHARS),
    "choice": _texts(MAX_CHOICES),
    "grammar": text(MAX_PATTERN_CHARS),
    "store": constant(False),
    "service_tier": constant("auto", "default"),
    "priority": integer(
        -MAX_PRIORITY,
        MAX_PRIORITY,
        default=0,
        description="Higher is more urgent; under any policy low ones are "
        "preempted first, and under the policy `priority` high ones are served first.",
    ),
    "session_id": {
        **text(MAX_NAME_BYTES),
        "description": "Keeps the KV of this conversation for its next turn. One sequence and one turn at a time.",
    },
    "cache_salt": {
        **text(MAX_NAME_BYTES),
        "description": "The cached KV of prompts is shared only among requests of the same salt.",
    },
    "user": ANY,
    "metadata": ANY,
    "safety_identifier": ANY,
    "prompt_cache_key": ANY,
    "prompt_cache_retention": ANY,
    "prompt_cache_options": ANY,
}
"""What completions and chat share."""

_PART = closed({"type": {"const": "text"}, "text": STRING})
_REFUSAL = closed({"type": {"const": "refusal"}, "refusal": STRING})
_CONTENT: Schema = {"anyOf": [STRING, {"type": "array", "items": _PART}]}
_NAME: Schema = {"type": ["string", "null"]}
_CALL = closed(
    {"id": STRING, "function": closed({"name": STRING, "arguments": STRING})}, {"type": {"const": "function"}}
)
TOOL_NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]+$", "maxLength": MAX_NAME_CHARS}


def _message(role: str, required: dict[str, Schema], optional: dict[str, Schema]) -> Schema:
    return closed({"role": {"const": role}, **required}, optional)


MESSAGE: Schema = {
    "oneOf": [
        *(_message(role, {"content": _CONTENT}, {"name": _NAME}) for role in ("system", "developer", "user")),
        _message(
            "assistant",
            {},
            {
                "content": one_of(STRING, {"type": "array", "items": {"anyOf": [_PART, _REFUSAL]}}),
                "refusal": _NAME,
                "name": _NAME,
                "tool_calls": one_of({"type": "array", "items": _CALL}),
                "reasoning_content": _NAME,
            },
        ),
        _message("tool", {"content": _CONTENT, "tool_call_id": STRING}, {"name": _NAME}),
        _message("function", {"name": STRING}, {"content": _NAME}),
    ]
}

TOOL = closed(
    {
        "type": {"const": "function"},
        "function": closed(
            {"name": TOOL_NAME},
            {"description": _NAME, "parameters": {"type": ["object", "null"]}, "strict": BOOLEAN},
        ),
    }
)
_NAMED_TOOL = closed({"type": {"const": "function"}, "function": closed({"name": STRING})})
TOOL_CHOICE = one_of(
    {"enum": ["none", "auto", "required"]},
    _NAMED_TOOL,
    closed(
        {
            "type": {"const": "allowed_tools"},
            "allowed_tools": closed(
                {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": _NAMED_TOOL}}
            ),
        }
    ),
)

COMPLETION = closed(
    {
        "model": STRING,
        "prompt": {
            "anyOf": [
                STRING,
                array(STRING, MAX_PROMPTS, 1),
                {"type": "array", "items": ID, "minItems": 1},
                array({"type": "array", "items": ID}, MAX_PROMPTS, 1),
            ]
        },
    },
    {
        **OPTIONS,
        "max_tokens": integer(0, INT32_MAX, default=COMPLETION_MAX_TOKENS),
        "logprobs": integer(0, MAX_TOP_LOGPROBS),
        "best_of": integer(1, MAX_N),
        "echo": BOOLEAN,
        "suffix": constant(""),
    },
)

CHAT = closed(
    {"model": STRING, "messages": array(MESSAGE, MAX_MESSAGES, 1)},
    {
        **OPTIONS,
        "max_tokens": integer(1, INT32_MAX, deprecated=True),
        "max_completion_tokens": integer(
            1, INT32_MAX, description="By default what there is room for, at most the server's --default-max-tokens."
        ),
        "logprobs": BOOLEAN,
        "top_logprobs": integer(0, MAX_TOP_LOGPROBS),
        "tools": one_of(array(TOOL, MAX_TOOLS)),
        "tool_choice": TOOL_CHOICE,
        "parallel_tool_calls": BOOLEAN,
        "add_generation_prompt": BOOLEAN,
        "continue_final_message": BOOLEAN,
        "chat_template_kwargs": {"type": ["object", "null"]},
        "reasoning_effort": constant(*REASONING_EFFORTS),
        "modalities": constant(["text"]),
        "verbosity": constant("medium"),
    },
)

ANSWER_ERROR = closed(
    {
        "error": closed(
            {name: {"type": ["string", "null"]} if name in ("param", "code") else STRING
             for name in ("message", "type", "param", "code")}
        )
    }
)  # fmt: skip


def error_response(description: str) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": ANSWER_ERROR}}}


def json_response(description: str, schema: Schema) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def takes(body: Schema, answer: Schema, names_model: bool = True) -> Schema:
    """What a route with such a body adds to its description; `answer` is its response."""
    errors = {
        "400": "The body is malformed, or more than the model can take.",
        **({"404": "There is no such model."} if names_model else {}),
        "413": "The body is too large.",
        "415": "The body is compressed, or not JSON.",
        "422": "A value is out of range or not supported.",
        "503": "Not ready, or too busy; try again later.",
    }
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": answer, **{status: error_response(text) for status, text in errors.items()}},
    }


def generates(body: Schema) -> Schema:
    """The same for a route that answers with what the model says."""
    content = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": STRING}}
    described = takes(body, {"description": "The answer, or with `stream` its events.", "content": content})
    described["responses"]["409"] = error_response("The session has a turn in progress; try again later.")
    return described
