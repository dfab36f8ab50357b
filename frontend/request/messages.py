"""The field `messages`: a conversation in the format of chat templates."""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Raw, Struct

from tandem.frontend.errors import ApiError, malformed, unsupported, unsupported_field
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.schema import Schema, array, of_type
from tandem.frontend.request.values import TypedDecoder, decode_field

MAX_MESSAGES = 8192
MAX_PARTS = 16384
"""Maximum number of content parts and tool calls of all messages together."""


class _Text(Struct, tag_field="type", tag="text"):
    text: str


class _InputText(_Text, tag_field="type", tag="input_text"):
    """Text part of a response's input; some clients send it to chats."""


class _OutputText(_Text, tag_field="type", tag="output_text"):
    """Type of a text part in a response's output."""


class _Refusal(Struct, tag_field="type", tag="refusal"):
    refusal: str


class _Function(Struct):
    name: str
    arguments: str


class _ToolCall(Struct):
    id: str
    function: _Function
    type: Literal["function"] = "function"
    index: int | None = None


_Parts = list[_Text | _InputText | _OutputText]


class _System(Struct, tag_field="role", tag="system"):
    content: str | _Parts | None
    name: str | None = None


class _Developer(_System, tag_field="role", tag="developer"):
    pass


class _User(_System, tag_field="role", tag="user"):
    pass


class _Tool(Struct, tag_field="role", tag="tool"):
    content: str | _Parts | None
    tool_call_id: str
    name: str | None = None


class _FunctionResult(Struct, tag_field="role", tag="function"):
    name: str
    content: str | None = None


class _Assistant(Struct, tag_field="role", tag="assistant"):
    content: str | list[_Text | _InputText | _OutputText | _Refusal] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None
    """Deprecated predecessor of `tool_calls`, with a single call."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    annotations: list[Raw] | None = None
    audio: None = None
    prefix: bool | None = None
    partial: bool | None = None


_Message = _System | _Developer | _User | _Tool | _FunctionResult | _Assistant

MESSAGES: Schema = array(of_type(_Message), MAX_MESSAGES, 1)
_DECODER = TypedDecoder(list[_Message])


def parse_messages(raw: Raw, ignored: IgnoredFields) -> list[dict[str, Any]]:
    """Parse the messages of a conversation.

    In the result, content is a string, arguments of tool calls are an object, and nulls are dropped. Several text parts
    of a message are joined by line breaks. Raises ApiError 400 for a malformed or unsupported message; `param` is the
    path of the fault.
    """
    data = bytes(memoryview(raw))
    # In valid JSON these bytes are a key or a separate string: quotes within text are escaped.
    for name, limit, items in ((b'"role"', MAX_MESSAGES, "messages"), (b'"type"', MAX_PARTS, "parts and tool calls")):
        if (count := data.count(name)) > limit:
            raise unsupported(f"{{param}} takes at most {limit} {items}, not {count}", "messages")
    messages: list[_Message] = _DECODER.read(data, "messages", ignored)
    if not messages:
        raise malformed("{param} is an empty array; give at least one message", "messages")
    plain = [_plain(message, f"messages[{index}]", ignored) for index, message in enumerate(messages)]
    if b'"function_call"' in data:
        _pair_function_calls(plain)
    return plain


def _plain(message: _Message, path: str, ignored: IgnoredFields) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.__struct_config__.tag}
    content = _joined(message.content)
    if isinstance(message, _Assistant):
        content = message.refusal if content is None else content
        plain |= _assistant_fields(message, path, ignored)
    if content is not None or not plain.keys() & {"tool_calls", "reasoning_content"}:
        plain["content"] = content or ""
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, _Tool):
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _assistant_fields(message: _Assistant, path: str, ignored: IgnoredFields) -> dict[str, Any]:
    """Convert the fields of an assistant's message."""
    for name in ("prefix", "partial"):
        if getattr(message, name):
            raise unsupported_field("{param} is not supported; send 'continue_final_message': true", f"{path}.{name}")
    if message.annotations:
        ignored.add(f"{path}.annotations")
    fields: dict[str, Any] = {}
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        fields["reasoning_content"] = reasoning
    calls = [tool_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    if message.function_call is not None and not calls:
        calls = [tool_call("", message.function_call.name, message.function_call.arguments)]
    if calls:
        fields["tool_calls"] = calls
    return fields


def _pair_function_calls(messages: list[dict[str, Any]]) -> None:
    """Assign tool call ids to the calls of `function_call` and their results.

    An id has nine letters and digits, which all templates accept.
    """
    call_id = ""
    for index, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            if not call["id"]:
                call_id = call["id"] = f"call{index:05d}"
        if message["role"] == "function" and call_id:
            message |= {"role": "tool", "tool_call_id": call_id}


def _joined(content: str | Sequence[_Text | _Refusal] | None) -> str | None:
    if content is None or isinstance(content, str):
        return content
    return "\n".join([part.text if isinstance(part, _Text) else part.refusal for part in content])


def tool_call(call_id: str, name: str, written: str) -> dict[str, Any]:
    """Build a tool call for a chat template.

    The template serializes the arguments. Arguments generated by a model that are not a JSON object remain text.
    """
    arguments: Any = written
    try:
        decoded = decode_field(written.encode(), "arguments") if written.strip() else {}
        arguments = decoded if isinstance(decoded, dict) else written
    except (ApiError, UnicodeEncodeError):
        pass
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
