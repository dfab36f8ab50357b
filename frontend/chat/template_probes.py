"""Determine what a chat template does by rendering small conversations.

Each conversation has unique words, so that the output shows how it was rendered. A rejected conversation gives no
information.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import Struct

from tandem.frontend.grammar.grammar import MISTRAL_THINK_TAGS, THINK_TAGS, ThinkTags

Render = Callable[[Sequence[dict[str, Any]], dict[str, Any]], Awaitable[str]]
"""Function that renders messages with additional variables; "" if the template rejects them."""

_QUESTION, _THOUGHT, _ANSWER, _NAME, _RESULT = "ZQUESTION", "ZTHOUGHT", "ZANSWER", "zfunction", "ZRESULT"
_USER: dict[str, Any] = {"role": "user", "content": _QUESTION}
_TOOL = {
    "type": "function",
    "function": {"name": "zother", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_OPENED_OBJECT = re.compile(r'\[?\s*\{[^{}]*"name":\s*"\Z')
"""A JSON object up to the value of its name."""
_NEXT_KEY = re.compile(r'"\s*,\s*"(parameters|arguments)"')
"""Text between the name and the key of the arguments."""
_XML_CALL = re.compile(r"<tool_call>\s*<function=\Z")
_XML_ARGUMENT = re.compile(r">\s*<parameter=zkey>\s*zvalue\s*</parameter>\s*</function>\s*</tool_call>")
_MAX_OBJECT_CHARS = 200
"""Maximum number of characters between the start of an object and its name."""


class TemplateFacts(Struct, frozen=True):
    """Results of the probes of a template."""

    call_format: str | None = None
    """Name of the tool call format; None if it is unknown, or calls are not rendered."""
    think_tags: ThinkTags | None = None
    """Reasoning tags that the template writes or searches for, or None."""


async def probe_template(render: Render) -> TemplateFacts:
    """Probe a template."""
    return TemplateFacts(await _call_format(render), await _think_tags(render))


async def _call_format(render: Render) -> str | None:
    """Return the name of the template's tool call format."""
    for arguments in ({"zkey": "zvalue"}, '{"zkey": "zvalue"}'):
        call = {"id": "zcall0001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        result = {"role": "tool", "tool_call_id": "zcall0001", "name": _NAME, "content": _RESULT}
        for content in ("", None):
            message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [call]}
            text = await render([_USER, message, result], {"tools": [_TOOL], "add_generation_prompt": True})
            if (found := _format_of_call(text)) is not None:
                return found
    return None


def _format_of_call(text: str) -> str | None:
    before, name, after = text.partition(_NAME)
    if not name:
        return None
    if before.rstrip().endswith("[TOOL_CALLS]"):
        named = {"[CALL_ID]": "mistral_v11", "[ARGS]": "mistral_v13"}
        return next((name for tag, name in named.items() if after.startswith(tag)), None)
    if _XML_CALL.search(before, max(0, len(before) - _MAX_OBJECT_CHARS)) and _XML_ARGUMENT.match(after):
        return "qwen3_coder"
    opened = _OPENED_OBJECT.search(before, max(0, len(before) - _MAX_OBJECT_CHARS))
    if opened is None:
        return None
    before = before[: opened.start()].rstrip()
    if before.endswith("<tool_call>"):
        return "hermes"
    if before.endswith("[TOOL_CALLS]"):
        return "mistral"
    key = _NEXT_KEY.match(after)
    return None if key is None else {"parameters": "llama3_json", "arguments": "json"}[key[1]]


async def _think_tags(render: Render) -> ThinkTags | None:
    """Return the reasoning tags that the template writes or searches for.

    It may write them before an answer, around the reasoning of a message, in its instructions, or as an empty pair to
    disable reasoning. It may also remove the text between them from a message.
    """
    thought: dict[str, Any] = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
    parts = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _ANSWER}]
    thought_in_parts: dict[str, Any] = {"role": "assistant", "content": parts}
    for messages, variables in (
        ([_USER], {"add_generation_prompt": True}),
        ([_USER, thought], {}),
        ([_USER], {"add_generation_prompt": True, "enable_thinking": False, "thinking": False}),
        ([_USER], {"add_generation_prompt": True, "enable_thinking": True, "thinking": True}),
        ([_USER, thought_in_parts], {}),
    ):
        text = await render(messages, variables)
        for tags in (THINK_TAGS, MISTRAL_THINK_TAGS):
            if tags.start in text or tags.end in text:
                return tags
    for tags in (THINK_TAGS, MISTRAL_THINK_TAGS):
        written = {"role": "assistant", "content": f"{tags.start}\n{_THOUGHT}\n{tags.end}\n\n{_ANSWER}"}
        text = await render([_USER, written, _USER], {"add_generation_prompt": True})
        if _ANSWER in text and _THOUGHT not in text:
            return tags
    return None
