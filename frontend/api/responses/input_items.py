"""The field `input` of `/v1/responses`: items of a conversation, as the messages that chat templates take."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from tandem.frontend.errors import malformed, unsupported
from tandem.frontend.request.fields import decode_field, misshapen
from tandem.frontend.request.messages import MAX_MESSAGES, MAX_PARTS, tool_call

_Status = Literal["in_progress", "completed", "incomplete"]


class _InputText(Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    text: str
    prompt_cache_breakpoint: Raw = Raw()


class _OutputText(Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    text: str
    annotations: Raw = Raw()
    logprobs: Raw = Raw()


class _Refusal(Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    refusal: str


class _Summary(Struct, tag_field="type", tag="summary_text", forbid_unknown_fields=True):
    text: str


class _Thought(Struct, tag_field="type", tag="reasoning_text", forbid_unknown_fields=True):
    text: str


class _Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_InputText | _OutputText | _Refusal]
    type: Literal["message"] = "message"
    id: str | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class _Call(Struct, forbid_unknown_fields=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _Status | None = None
    namespace: None = None
    caller: None = None


class _Output(Struct, forbid_unknown_fields=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[_InputText]
    id: str | None = None
    status: _Status | None = None
    name: str | None = None
    namespace: None = None
    caller: None = None


class _Reasoning(Struct, forbid_unknown_fields=True):
    type: Literal["reasoning"]
    summary: list[_Summary] = []
    content: list[_Thought] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: _Status | None = None


class _Kind(Struct):
    type: str = "message"


_Item = _Message | _Call | _Output | _Reasoning
_SHAPES: dict[str, type[_Item]] = {
    "message": _Message,
    "function_call": _Call,
    "function_call_output": _Output,
    "reasoning": _Reasoning,
}


def parse_input(raw: Raw | None, instructions: str | None) -> list[dict[str, Any]]:
    """The messages, `instructions` ahead of them as the system's.

    A call belongs to the assistant's message before it, plain thoughts to the one after them; summaries and encrypted
    thoughts say nothing to a model and are dropped. Raises ApiError 400 for another shape, 422 for what is not
    supported; `param` is the place.
    """
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    given = _given(raw)
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not given:
        raise malformed("'input' is an empty array; give at least one item", "input")
    return messages + _messages([_item(data, index) for index, data in enumerate(given)])


def _given(raw: Raw | None) -> str | list[Raw]:
    data = b"" if raw is None else bytes(memoryview(raw))
    if data in (b"", b"null"):
        raise malformed("the field 'input' is required", "input")
    if not data.startswith(b'"'):
        # In valid JSON these bytes are a key or a string of their own: quotes within a text have a backslash.
        for name, most in ((b'"role"', MAX_MESSAGES), (b'"type"', MAX_PARTS)):
            if (count := data.count(name)) > most:
                raise unsupported(f"'input' takes at most {most} of {name.decode()}, not {count}", "input")
    try:
        given: str | list[Raw] = decode_field(data, "input", str | list[Raw])
    except msgspec.ValidationError as error:
        raise misshapen(error, "input") from None
    if len(given) > MAX_PARTS and not isinstance(given, str):
        raise unsupported(f"'input' takes at most {MAX_PARTS} items, not {len(given)}", "input")
    return given


def _item(data: Raw, index: int) -> _Item:
    place = f"input[{index}]"
    try:
        kind = decode_field(data, place, _Kind).type
        if kind not in _SHAPES:
            known = ", ".join(_SHAPES)
            raise unsupported(
                f"'{place}.type': {kind[:40]!r} is not supported; this server takes {known}", f"{place}.type"
            )
        item: _Item = decode_field(data, place, _SHAPES[kind])
    except msgspec.ValidationError as error:
        raise misshapen(error, place) from None
    return item


def _messages(items: Sequence[_Item]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    thoughts: dict[str, Any] = {}
    for item in items:
        match item:
            case _Reasoning():
                text = _joined(item.content or [])
                thoughts = {"reasoning_content": text} if text else {}
                continue
            case _Message(role="assistant"):
                messages.append({"role": "assistant", "content": _joined(item.content), **thoughts})
            case _Message():
                messages.append({"role": item.role, "content": _joined(item.content)})
            case _Output():
                messages.append({"role": "tool", "content": _joined(item.output), "tool_call_id": item.call_id})
            case _Call():
                if thoughts or not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", **thoughts})
                call = tool_call(item.call_id, item.name, item.arguments)
                messages[-1].setdefault("tool_calls", []).append(call)
        thoughts = {}
    if thoughts:
        messages.append({"role": "assistant", **thoughts})
    return messages


def _joined(content: str | Sequence[_InputText | _OutputText | _Refusal | _Thought]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join([part.refusal if isinstance(part, _Refusal) else part.text for part in content])
