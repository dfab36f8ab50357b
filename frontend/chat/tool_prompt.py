"""Describe tools in the text of messages, for a chat template that does not render tools.

The description lists the functions and the tool call format.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec
from msgspec import structs

from tandem.frontend.grammar.tool_calls import CallSyntax
from tandem.frontend.request.conversation import Conversation

_SYSTEM_ROLES = ("system", "developer")
_RESULT_ROLES = ("tool", "function")


def with_tools_as_text(conversation: Conversation, syntax: CallSyntax) -> Conversation:
    """Convert tools, earlier calls and their results to text of the messages.

    The tools are appended to the system message.
    """
    messages = exchanges_as_text(conversation.messages, syntax)
    if conversation.tools:
        text = _description(conversation.tools, syntax)
        if messages and messages[0]["role"] in _SYSTEM_ROLES:
            messages[0] = _joined(messages[0], text)
        else:
            messages.insert(0, {"role": "system", "content": text})
    return structs.replace(conversation, messages=messages, tools=())


def exchanges_as_text(messages: Sequence[dict[str, Any]], syntax: CallSyntax) -> list[dict[str, Any]]:
    """Convert calls to assistant text in the model's tool call format, and results to user text.

    Consecutive results share a message.
    """
    found: list[dict[str, Any]] = []
    for are_results, group in groupby(messages, lambda message: message["role"] in _RESULT_ROLES):
        if are_results:
            # Join once: a conversation may have thousands of results.
            found.append({"role": "user", "content": "\n\n".join([_result(message) for message in group])})
        else:
            found += [calls_as_text(message, syntax) for message in group]
    return found


def calls_as_text(message: dict[str, Any], syntax: CallSyntax) -> dict[str, Any]:
    """Append the calls of a message to its text, in the model's format."""
    if not (calls := message.get("tool_calls")):
        return message
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return _joined(rest, _calls([call["function"] for call in calls], syntax))


def _description(tools: Sequence[dict[str, Any]], syntax: CallSyntax) -> str:
    functions = "\n".join([_json(tool["function"]) for tool in tools])
    arguments = {"PARAMETER": "VALUE"} if syntax.is_xml else {}
    example = _calls([{"name": "NAME", "arguments": arguments}], syntax)
    return (
        f"You can call these functions, one JSON object a line:\n{functions}\n\n"
        f"To call a function, write its name and its arguments in this form and nothing after it:\n{example}"
    )


def _calls(functions: Sequence[dict[str, Any]], syntax: CallSyntax) -> str:
    """Return calls in the model's format."""
    written = [
        syntax.before + syntax.written(function["name"], function["arguments"]) + syntax.after for function in functions
    ]
    return syntax.opening + syntax.between.join(written) + syntax.closing


def _result(message: dict[str, Any]) -> str:
    return (
        f"Result of the function call {message.get('tool_call_id') or message.get('name', '')}:\n{message['content']}"
    )


def _joined(message: dict[str, Any], text: str) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": f"{content}\n\n{text}" if content else text}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
