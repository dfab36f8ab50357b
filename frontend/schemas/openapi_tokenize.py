"""What `/openapi.json` says of the bodies of `/tokenize` and `/detokenize`."""

from tandem.frontend.api.openapi import BOOLEAN, CHAT, ID, MESSAGE, STRING, Schema, array, closed
from tandem.frontend.request.messages import MAX_MESSAGES
from tandem.frontend.schemas.tokenize import MAX_TEXT_CHARS

_MODEL: Schema = {"type": ["string", "null"]}
_SHARED: dict[str, Schema] = {"model": _MODEL, "add_special_tokens": BOOLEAN, "return_token_strs": BOOLEAN}
_CONVERSATION = (
    *("tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt", "continue_final_message"),
    *("chat_template_kwargs", "reasoning_effort"),
)

TOKENIZE: Schema = {
    "anyOf": [
        closed({"prompt": {"type": "string", "maxLength": MAX_TEXT_CHARS}}, _SHARED),
        closed(
            {"messages": array(MESSAGE, MAX_MESSAGES, 1)},
            {**_SHARED, **{name: CHAT["properties"][name] for name in _CONVERSATION}},
        ),
    ]
}
TOKENIZED = closed(
    {"count": ID, "max_model_len": ID, "tokens": {"type": "array", "items": ID}},
    {"token_strs": {"type": "array", "items": STRING}},
)
DETOKENIZE = closed({"tokens": {"type": "array", "items": ID}}, {"model": _MODEL, "skip_special_tokens": BOOLEAN})
DETOKENIZED = closed({"prompt": STRING})
