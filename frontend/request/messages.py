"""The field `messages`: a conversation in the form that chat templates take."""

from typing import Any, Literal

from msgspec import Raw, Struct

from tandem.frontend.errors import ApiError, malformed, unsupported
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.schema import Schema, array, of_type
from tandem.frontend.request.values import TypedDecoder, decode_field

MAX_MESSAGES = 8192
MAX_PARTS = 16384
"""Maximum number of content parts and tool calls of all messages together."""


class _Text(Struct, tag_field="type", tag="text"):
    text: str


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


class _System(Struct, tag_field="role", tag="system"):
    content: str | list[_Text]
    name: str | None = None


class _Developer(_System, tag_field="role", tag="developer"):
    pass


class _User(_System, tag_field="role", tag="user"):
    pass


class _Tool(Struct, tag_field="role", tag="tool"):
    content: str | list[_Text]
    tool_call_id: str
    name: str | None = None


class _FunctionResult(Struct, tag_field="role", tag="function"):
    name: str
    content: str | None = None


class _Assistant(Struct, tag_field="role", tag="assistant"):
    content: str | list[_Text | _Refusal] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    reasoning_content: str | None = None
    annotations: list[None] | None = None
    audio: None = None
    function_call: None = None


_Message = _System | _Developer | _User | _Tool | _FunctionResult | _Assistant

MESSAGES: Schema = array(of_type(_Message), MAX_MESSAGES, 1)
_DECODER = TypedDecoder(list[_Message])


def parse_messages(raw: Raw, ignored: IgnoredFields) -> list[dict[str, Any]]:
    """Parse the messages of a conversation.

    In the result, content is one string, arguments of tool calls are an object, and nulls are left out. Several text
    parts of one message are joined by line breaks. Raises ApiError 400 for a malformed message, and for one that is not
    supported; `param` is the path of the fault.
    """
    data = bytes(memoryview(raw))
    # In valid JSON these bytes are a key or a string of their own: quotes within a text have a backslash.
    for name, most, items in ((b'"role"', MAX_MESSAGES, "messages"), (b'"type"', MAX_PARTS, "parts and tool calls")):
        if (count := data.count(name)) > most:
            raise unsupported(f"{{param}} takes at most {most} {items}, not {count}", "messages")
    messages: list[_Message] = _DECODER.read(data, "messages", ignored)
    if not messages:
        raise malformed("{param} is an empty array; give at least one message", "messages")
    return [_plain(message, index) for index, message in enumerate(messages)]


def _plain(message: _Message, index: int) -> dict[str, Any]:
    role = message.__struct_config__.tag
    plain: dict[str, Any] = {"role": role}
    content = _joined(message.content)
    if isinstance(message, _Assistant):
        content = message.refusal if content is None else content
        if content is None and not message.tool_calls and message.reasoning_content is None:
            path = f"messages[{index}].content"
            raise malformed("{param} is required in an assistant message without 'tool_calls'", path)
        if message.reasoning_content is not None:
            plain["reasoning_content"] = message.reasoning_content
    if content is not None:
        plain["content"] = content
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, _Tool):
        plain["tool_call_id"] = message.tool_call_id
    if isinstance(message, _Assistant) and message.tool_calls:
        plain["tool_calls"] = [
            tool_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls
        ]
    return plain


def _joined(content: str | list[_Text] | list[_Text | _Refusal] | None) -> str | None:
    if content is None or isinstance(content, str):
        return content
    return "\n".join([part.text if isinstance(part, _Text) else part.refusal for part in content])


def tool_call(call_id: str, name: str, written: str) -> dict[str, Any]:
    """Build a tool call for a chat template.

    The template writes the arguments as JSON itself. Arguments that a model wrote and that are not a JSON object stay
    text.
    """
    arguments: Any = written
    try:
        decoded = decode_field(written.encode(), "arguments") if written.strip() else {}
        arguments = decoded if isinstance(decoded, dict) else written
    except (ApiError, UnicodeEncodeError):
        pass
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
