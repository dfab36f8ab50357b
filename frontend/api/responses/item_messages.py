"""Convert the items of a conversation to messages for chat templates."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.frontend.api.responses.carried_reasoning import read_reasoning
from tandem.frontend.api.responses.input_items import (
    AdditionalTools,
    CallOutput,
    CustomCall,
    Dropped,
    FunctionCall,
    InputItem,
    InputText,
    LocalCall,
    LocalOutput,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    Reference,
    Refusal,
    ShellText,
)
from tandem.frontend.api.responses.tools import CUSTOM_ARGUMENT, ResponseTools
from tandem.frontend.request.messages import tool_call

Messages = list[dict[str, Any]]


def item_messages(items: Sequence[InputItem], tools: ResponseTools) -> Messages:
    """Convert items to messages.

    A call joins the assistant message before it, reasoning the one after it. Summaries and reasoning encrypted by other
    servers are dropped. Calls use the names under which the model knows the tools.
    """
    messages: Messages = []
    reasoning: dict[str, Any] = {}
    for given in items:
        match given.item:
            case Reasoning(content=content, encrypted_content=carried):
                text = _joined(content or []) or read_reasoning(carried)
                reasoning = {"reasoning_content": text} if text else {}
                continue
            case Dropped() | Reference() | AdditionalTools():
                continue
            case Message(role="assistant", content=content):
                messages.append({"role": "assistant", "content": _joined(content), **reasoning})
            case Message(role=role, content=content):
                messages.append({"role": role, "content": _joined(content)})
            case CallOutput(call_id=call_id, output=output):
                messages.append({"role": "tool", "content": _joined(output), "tool_call_id": call_id})
            case LocalOutput() as output:
                call_id = output.call_id or output.id or ""
                messages.append({"role": "tool", "content": _local_result(output), "tool_call_id": call_id})
            case FunctionCall() | CustomCall() | LocalCall() as call:
                if reasoning or not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", **reasoning})
                messages[-1].setdefault("tool_calls", []).append(_call(call, tools))
        reasoning = {}
    if reasoning:
        messages.append({"role": "assistant", **reasoning})
    return messages


def _call(call: FunctionCall | CustomCall | LocalCall, tools: ResponseTools) -> dict[str, Any]:
    """Convert a call, with arguments as JSON text."""
    match call:
        case FunctionCall(arguments=arguments):
            name = tools.model_name(call.name, call.namespace)
        case CustomCall(input=given):
            name, arguments = tools.model_name(call.name, call.namespace), _encoded({CUSTOM_ARGUMENT: given})
        case LocalCall(action=action, operation=operation):
            name, arguments = call.type.removesuffix("_call"), _encoded(action or operation or {})
    return tool_call(call.call_id, name, arguments)


def _local_result(result: LocalOutput) -> str:
    """Format the result of a shell command or a patch as text."""
    if isinstance(result.output, str):
        return result.output
    if result.output is None:
        return result.status or ""
    return "\n".join([text for part in result.output for text in _shell_lines(part)])


def _shell_lines(part: ShellText) -> list[str]:
    outcome = _encoded(part.outcome) if part.outcome else ""
    return [text for text in (part.stdout.rstrip("\n"), part.stderr.rstrip("\n"), outcome) if text]


def _joined(content: str | Sequence[InputText | OutputText | Refusal | ReasoningText]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join([part.refusal if isinstance(part, Refusal) else part.text for part in content])


def _encoded(value: object) -> str:
    return msgspec.json.encode(value).decode()
