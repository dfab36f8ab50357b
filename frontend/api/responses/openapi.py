"""What `/openapi.json` says of the body of `/v1/responses`."""

from tandem.frontend.api.openapi import (
    ANY,
    BOOLEAN,
    OPTIONS,
    STRING,
    TOOL_NAME,
    Schema,
    array,
    closed,
    constant,
    integer,
    one_of,
)
from tandem.frontend.api.responses.request import INCLUDES, MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE, NOT_HERE
from tandem.frontend.request.conversation import REASONING_EFFORTS
from tandem.frontend.request.messages import MAX_PARTS
from tandem.frontend.request.options import INT32_MAX
from tandem.frontend.request.tools import MAX_TOOLS

_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_STATUS = constant("in_progress", "completed", "incomplete")
_INPUT_TEXT = closed({"type": {"const": "input_text"}, "text": STRING}, {"prompt_cache_breakpoint": ANY})
_OUTPUT_TEXT = closed({"type": {"const": "output_text"}, "text": STRING}, {"annotations": ANY, "logprobs": ANY})
_REFUSAL = closed({"type": {"const": "refusal"}, "refusal": STRING})


def _parts(*parts: Schema) -> Schema:
    return {"type": "array", "items": {"anyOf": [*parts]}}


def _typed(kind: str, required: dict[str, Schema], optional: dict[str, Schema]) -> Schema:
    return closed({"type": {"const": kind}, **required}, {"id": _TEXT_OR_NULL, "status": _STATUS, **optional})


ITEM: Schema = {
    "anyOf": [
        closed(
            {
                "role": {"enum": ["system", "developer", "user", "assistant"]},
                "content": {"anyOf": [STRING, _parts(_INPUT_TEXT, _OUTPUT_TEXT, _REFUSAL)]},
            },
            {
                "type": {"const": "message"},
                "id": _TEXT_OR_NULL,
                "status": _STATUS,
                "phase": constant("commentary", "final_answer"),
            },
        ),
        _typed(
            "function_call",
            {"call_id": STRING, "name": STRING, "arguments": STRING},
            {"namespace": constant(), "caller": constant()},
        ),
        _typed(
            "function_call_output",
            {"call_id": STRING, "output": {"anyOf": [STRING, _parts(_INPUT_TEXT)]}},
            {"name": _TEXT_OR_NULL, "namespace": constant(), "caller": constant()},
        ),
        _typed(
            "reasoning",
            {},
            {
                "summary": _parts(closed({"type": {"const": "summary_text"}, "text": STRING})),
                "content": one_of(_parts(closed({"type": {"const": "reasoning_text"}, "text": STRING}))),
                "encrypted_content": _TEXT_OR_NULL,
            },
        ),
    ]
}

_FORMAT: Schema = one_of(
    closed({"type": {"enum": ["text", "json_object"]}}),
    closed(
        {"type": {"const": "json_schema"}, "name": {"type": "string", "minLength": 1}, "schema": {"type": "object"}},
        {"description": _TEXT_OR_NULL, "strict": BOOLEAN},
    ),
)
_NAMED = closed({"type": {"const": "function"}, "name": STRING})

RESPONSES = closed(
    {"model": STRING, "input": {"anyOf": [STRING, array(ITEM, MAX_PARTS, 1)]}},
    {
        **{name: schema for name, schema in OPTIONS.items() if name not in NOT_HERE},
        "instructions": _TEXT_OR_NULL,
        "max_output_tokens": integer(
            1, INT32_MAX, description="By default what there is room for, at most the server's --default-max-tokens."
        ),
        "metadata": one_of(
            {
                "type": "object",
                "propertyNames": {"maxLength": MAX_METADATA_KEY},
                "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
                "maxProperties": MAX_METADATA,
            }
        ),
        "text": one_of(closed({}, {"format": _FORMAT, "verbosity": constant("medium")})),
        "tools": one_of(
            array(
                closed(
                    {"type": {"const": "function"}, "name": TOOL_NAME},
                    {"description": _TEXT_OR_NULL, "parameters": {"type": ["object", "null"]}, "strict": BOOLEAN},
                ),
                MAX_TOOLS,
            )
        ),
        "tool_choice": one_of(
            {"enum": ["none", "auto", "required"]},
            _NAMED,
            closed(
                {
                    "type": {"const": "allowed_tools"},
                    "mode": {"enum": ["auto", "required"]},
                    "tools": {"type": "array", "items": _NAMED, "minItems": 1},
                }
            ),
        ),
        "parallel_tool_calls": BOOLEAN,
        "reasoning": one_of(
            closed(
                {},
                {
                    "effort": constant(*REASONING_EFFORTS),
                    "summary": constant("auto"),
                    "generate_summary": constant("auto"),
                },
            )
        ),
        "chat_template_kwargs": {"type": ["object", "null"]},
        "include": one_of({"type": "array", "items": {"enum": [*INCLUDES]}}),
        "truncation": constant("disabled"),
        "background": constant(False),
        "top_logprobs": constant(0),
        **dict.fromkeys(("prompt_cache_key", "safety_identifier", "user"), _TEXT_OR_NULL),
    },
)
