"""The fields `system` and `messages` of `/v1/messages`.

Their content blocks are converted to messages for chat templates.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct, field

from tandem.frontend.errors import ApiError, malformed, unsupported
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.messages import MAX_MESSAGES, MAX_PARTS
from tandem.frontend.request.schema import STRING, Schema, array, of_type
from tandem.frontend.request.values import TypedDecoder

BILLING_PREFIX = "x-anthropic-billing-header:"
"""Prefix of a system block that Claude Code adds for Anthropic's billing.

It differs between requests, so a prompt that starts with it would never hit the prefix cache.
"""
ERROR_PREFIX = "Error: "
"""Prefix of the result of a failed tool (`is_error`), for which chat templates have no other field."""


class _Text(Struct, tag_field="type", tag="text"):
    text: str
    cache_control: Raw = field(default_factory=Raw)
    citations: Raw = field(default_factory=Raw)


class _ToolUse(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Raw = field(default_factory=Raw)
    caller: Raw = field(default_factory=Raw)


class _ToolResult(Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text] | None = None
    is_error: bool | None = None
    cache_control: Raw = field(default_factory=Raw)


class _Thinking(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: Raw = field(default_factory=Raw)


class _RedactedThinking(Struct, tag_field="type", tag="redacted_thinking"):
    data: Raw = field(default_factory=Raw)


class _System(Struct, tag_field="role", tag="system"):
    content: str | list[_Text]


class _User(Struct, tag_field="role", tag="user"):
    content: str | list[_Text | _ToolResult]


class _Assistant(Struct, tag_field="role", tag="assistant"):
    content: str | list[_Text | _ToolUse | _Thinking | _RedactedThinking]


_Message = _System | _User | _Assistant


class _AnyMessage(Struct):
    role: str
    content: Raw


class _AnyBlock(Struct):
    type: str
    content: Raw = field(default_factory=Raw)


_BLOCK_TYPES = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}
"""Supported content block types, by message role."""

_TEXTS = frozenset(("content", "reasoning_content"))
"""Keys of a message with texts that are collected, and joined at the end."""

SYSTEM: Schema = {"anyOf": [STRING, array(of_type(_Text), MAX_PARTS), {"type": "null"}]}
MESSAGES: Schema = array(of_type(_Message), MAX_MESSAGES, 1)


_SYSTEM_DECODER = TypedDecoder(str | list[_Text])
_DECODER = TypedDecoder(list[_Message])


def parse_system(raw: Raw, ignored: IgnoredFields) -> str:
    """Parse the system prompt; "" if there is none.

    Several blocks are joined by line breaks. Raises ApiError 400 for a malformed block, or one that is not text.
    """
    _check_counts(bytes(memoryview(raw)), "system")
    found: str | list[_Text] = _SYSTEM_DECODER.read(raw, "system", ignored)
    if isinstance(found, str):
        return found
    return _joined([block for block in found if not block.text.startswith(BILLING_PREFIX)])


def parse_messages(raw: Raw, ignored: IgnoredFields) -> list[dict[str, Any]]:
    """Parse the messages of a conversation.

    Consecutive turns of one role are merged, as in Anthropic's API, and each tool result is a separate message.
    Redacted thinking and signatures are dropped. Raises ApiError 400 for a malformed or unsupported message; `param` is
    the path of the fault.
    """
    data = bytes(memoryview(raw))
    _check_counts(data, "messages")
    turns = _decode(data, ignored)
    if not turns:
        raise malformed("{param} is an empty array; give at least one message", "messages")
    messages: list[dict[str, Any]] = []
    for turn in turns:
        match turn:
            case _Assistant(content=content):
                _add_assistant(messages, content)
            case _User(content=content):
                _add_user(messages, content)
            case _System(content=content):
                messages.append({"role": "system", "content": [_joined(content)]})
    if "tool_calls" in messages[-1]:
        raise malformed("{param}: the last message calls tools; add their results as 'tool_result' blocks", "messages")
    for message in messages:
        for key in _TEXTS.intersection(message):
            message[key] = "\n".join(message[key])
    return messages


def _decode(data: bytes, ignored: IgnoredFields) -> list[_Message]:
    try:
        turns: list[_Message] = _DECODER.read(data, "messages", ignored)
    except ApiError:
        _refuse_other_blocks(data)
        raise
    return turns


def _refuse_other_blocks(data: bytes) -> None:
    """Raise ApiError for the first block of an unsupported type.

    Nothing within a block is decoded, so this is cheap even for large images.
    """
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        for index, message in enumerate(msgspec.json.decode(data, type=list[_AnyMessage])):
            if message.role in _BLOCK_TYPES:
                _check_blocks(message.content, f"messages[{index}].content", _BLOCK_TYPES[message.role])


def _check_blocks(content: Raw, path: str, known: Sequence[str]) -> None:
    if bytes(memoryview(content)[:1]) != b"[":
        return
    for index, block in enumerate(msgspec.json.decode(content, type=list[_AnyBlock])):
        if block.type not in known:
            message = f"{{param}}: {block.type[:40]!r} is not supported here; this server reads {', '.join(known)}"
            raise unsupported(message, f"{path}[{index}].type")
        if block.type == "tool_result":
            _check_blocks(block.content, f"{path}[{index}].content", ("text",))


def _check_counts(data: bytes, name: str) -> None:
    """Raise ApiError 400 for too many messages or blocks, before any is built."""
    # In valid JSON these bytes are a key or a separate string: quotes within text are escaped.
    for key, limit, items in ((b'"role"', MAX_MESSAGES, "messages"), (b'"type"', MAX_PARTS, "content blocks")):
        if (count := data.count(key)) > limit:
            raise unsupported(f"{{param}} takes at most {limit} {items}, not {count}", name)


def _add_user(messages: list[dict[str, Any]], content: str | Sequence[_Text | _ToolResult]) -> None:
    for block in [_Text(content)] if isinstance(content, str) else content or [_Text("")]:
        if isinstance(block, _ToolResult):
            text = (ERROR_PREFIX if block.is_error else "") + _joined(block.content or "")
            messages.append({"role": "tool", "content": [text], "tool_call_id": block.tool_use_id})
        else:
            _turn(messages, "user").setdefault("content", []).append(block.text)


def _add_assistant(
    messages: list[dict[str, Any]], content: str | Sequence[_Text | _ToolUse | _Thinking | _RedactedThinking]
) -> None:
    message = _turn(messages, "assistant")
    for block in [_Text(content)] if isinstance(content, str) else content:
        match block:
            case _Text(text=text):
                message.setdefault("content", []).append(text)
            case _Thinking(thinking=text) if text:
                message.setdefault("reasoning_content", []).append(text)
            case _ToolUse(id=call_id, name=name, input=arguments):
                call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                message.setdefault("tool_calls", []).append(call)
    if "tool_calls" not in message:
        message.setdefault("content", [])


def _turn(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """Return the last message if it has this role, otherwise a new one."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role})
    return messages[-1]


def _joined(content: str | Sequence[_Text]) -> str:
    return content if isinstance(content, str) else "\n".join([block.text for block in content])
