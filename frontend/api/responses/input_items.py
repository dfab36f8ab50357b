"""The field `input` of `/v1/responses`.

Its conversation items are converted to messages for chat templates.
"""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Raw, Struct, field

from tandem.frontend.errors import malformed, unsupported
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.messages import MAX_MESSAGES, MAX_PARTS, tool_call
from tandem.frontend.request.schema import STRING, Schema, array, of_type
from tandem.frontend.request.values import TypedDecoder

_Status = Literal["in_progress", "completed", "incomplete"]


class _InputText(Struct, tag_field="type", tag="input_text"):
    text: str
    prompt_cache_breakpoint: Raw = field(default_factory=Raw)


class _OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: Raw = field(default_factory=Raw)
    logprobs: Raw = field(default_factory=Raw)


class _Refusal(Struct, tag_field="type", tag="refusal"):
    refusal: str


class _Summary(Struct, tag_field="type", tag="summary_text"):
    text: str


class _ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class _Message(Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_InputText | _OutputText | _Refusal]
    type: Literal["message"] = "message"
    id: str | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class _Call(Struct):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _Status | None = None
    namespace: None = None
    caller: None = None


class _Output(Struct):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[_InputText]
    id: str | None = None
    status: _Status | None = None
    name: str | None = None
    namespace: None = None
    caller: None = None


class _Reasoning(Struct):
    type: Literal["reasoning"]
    summary: list[_Summary] = []
    content: list[_ReasoningText] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: _Status | None = None


class _ItemType(Struct):
    type: str = "message"


_Item = _Message | _Call | _Output | _Reasoning
_ITEMS: dict[str, type[_Item]] = {
    "message": _Message,
    "function_call": _Call,
    "function_call_output": _Output,
    "reasoning": _Reasoning,
}


_INPUT_DECODER = TypedDecoder(str | list[Raw])
_TYPE_DECODER = TypedDecoder(_ItemType)
_ITEM_DECODERS = {name: TypedDecoder(item) for name, item in _ITEMS.items()}

INPUT: Schema = {"anyOf": [STRING, array({"anyOf": [of_type(item) for item in _ITEMS.values()]}, MAX_PARTS, 1)]}


def parse_input(raw: Raw, ignored: IgnoredFields) -> list[dict[str, Any]]:
    """Parse the input as messages.

    A call belongs to the assistant's message before it, reasoning to the one after it; summaries and encrypted
    reasoning mean nothing to a model and are dropped. Raises ApiError 400 for a malformed item, and for one that is
    not supported; `param` is the path of the fault.
    """
    found = _split(raw)
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if not found:
        raise malformed("{param} is an empty array; give at least one item", "input")
    return _messages([_item(data, index, ignored) for index, data in enumerate(found)])


def _split(raw: Raw) -> str | list[Raw]:
    data = bytes(memoryview(raw))
    if not data.startswith(b'"'):
        # In valid JSON these bytes are a key or a string of their own: quotes within a text have a backslash.
        for name, most in ((b'"role"', MAX_MESSAGES), (b'"type"', MAX_PARTS)):
            if (count := data.count(name)) > most:
                raise unsupported(f"{{param}} takes at most {most} of {name.decode()}, not {count}", "input")
    found: str | list[Raw] = _INPUT_DECODER.decode(data, "input")
    if len(found) > MAX_PARTS and not isinstance(found, str):
        raise unsupported(f"{{param}} takes at most {MAX_PARTS} items, not {len(found)}", "input")
    return found


def _item(data: Raw, index: int, ignored: IgnoredFields) -> _Item:
    path = f"input[{index}]"
    item_type = _TYPE_DECODER.decode(data, path).type
    if item_type not in _ITEMS:
        known = ", ".join(_ITEMS)
        raise unsupported(
            f"{{param}}: {item_type[:40]!r} is not supported; this server accepts {known}", f"{path}.type"
        )
    item: _Item = _ITEM_DECODERS[item_type].read(data, path, ignored)
    return item


def _messages(items: Sequence[_Item]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    reasoning: dict[str, Any] = {}
    for item in items:
        match item:
            case _Reasoning():
                text = _joined(item.content or [])
                reasoning = {"reasoning_content": text} if text else {}
                continue
            case _Message(role="assistant"):
                messages.append({"role": "assistant", "content": _joined(item.content), **reasoning})
            case _Message():
                messages.append({"role": item.role, "content": _joined(item.content)})
            case _Output():
                messages.append({"role": "tool", "content": _joined(item.output), "tool_call_id": item.call_id})
            case _Call():
                if reasoning or not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", **reasoning})
                call = tool_call(item.call_id, item.name, item.arguments)
                messages[-1].setdefault("tool_calls", []).append(call)
        reasoning = {}
    if reasoning:
        messages.append({"role": "assistant", **reasoning})
    return messages


def _joined(content: str | Sequence[_InputText | _OutputText | _Refusal | _ReasoningText]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join([part.refusal if isinstance(part, _Refusal) else part.text for part in content])
