"""Adapt messages to a chat template that does not support them as given."""

import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import structs

from tandem.frontend.chat.template_traits import ContentForm, Message, TemplateTraits
from tandem.frontend.chat.tool_prompt import calls_as_text, exchanges_as_text, with_tools_as_text
from tandem.frontend.grammar.tool_calls import CallSyntax
from tandem.frontend.request.conversation import Conversation

_SYSTEM_ROLES = ("system", "developer")
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


def adapted(conversation: Conversation, traits: TemplateTraits, syntax: CallSyntax) -> Conversation:
    """Adapt messages to the template's traits; leave everything else unchanged.

    syntax: tool call format, for templates that do not render tools.
    """
    messages = [_with_known_role(message, traits) for message in conversation.messages]
    if conversation.tools and not traits.tools:
        conversation = with_tools_as_text(structs.replace(conversation, messages=messages), syntax)
        messages = conversation.messages
    elif not traits.exchanges:
        messages = exchanges_as_text(messages, syntax)
    else:
        messages = _with_calls(messages, traits, syntax)
    # The last message is unchanged if it is to be continued, which requires text.
    filled = len(messages) - conversation.continue_final_message
    messages = [_with_content(message, traits) for message in messages[:filled]] + messages[filled:]
    lone_system = traits.lone_system_with_tools if conversation.tools else traits.lone_system
    takes_system = traits.system and (
        (lone_system or any(message["role"] == "user" for message in messages))
        and (traits.system_before_result or not _ends_with_result(messages))
    )
    messages = _with_system(messages, traits, takes_system)
    return structs.replace(conversation, messages=_in_turns(messages, traits))


def _with_known_role(message: Message, traits: TemplateTraits) -> Message:
    """Return a message with a role that the template supports.

    Other roles are replaced with an equivalent, in a copy.
    """
    role = message["role"]
    if role == "developer" and not traits.developer:
        return {**message, "role": "system"}
    return {**message, "role": "tool"} if role == "function" else message


def _with_calls(messages: Sequence[Message], traits: TemplateTraits, syntax: CallSyntax) -> list[Message]:
    """Convert calls and results to the form that the template supports."""
    found: list[Message] = []
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            # A template that does not count a call as a turn needs its result.
            if not traits.user_after_result and _is_abandoned(messages[index + 1 :]):
                found.append(calls_as_text(message, syntax))
            else:
                found += _calling(message, traits, syntax)
        elif message["role"] == "tool" and not traits.any_call_id and "tool_call_id" in message:
            found.append({**message, "tool_call_id": _short_id(message["tool_call_id"])})
        else:
            found.append(message)
    return found if traits.parallel_calls else _with_calls_one_by_one(found)


def _calling(message: Message, traits: TemplateTraits, syntax: CallSyntax) -> list[Message]:
    """Convert a message with calls to messages that the template supports."""
    if message.get("content") and traits.calls_with_text == "as text":
        return [calls_as_text(message, syntax)]
    message = {**message, "tool_calls": [_call(call, traits) for call in message["tool_calls"]]}
    if message.get("content") and traits.calls_with_text == "split":
        text = {name: value for name, value in message.items() if name != "tool_calls"}
        return [text, {"role": "assistant", "tool_calls": message["tool_calls"]}]
    return [message]


def _call(call: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    if not traits.any_call_id:
        call = {**call, "id": _short_id(call["id"])}
    function = call["function"]
    arguments = function["arguments"]
    if traits.arguments_are_text and not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    elif isinstance(arguments, str) and not traits.any_arguments:
        arguments = {"arguments": arguments}
    return {**call, "function": {**function, "arguments": arguments}}


def _short_id(call_id: str) -> str:
    """Return a deterministic id of nine letters and digits for an id."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _with_calls_one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Split messages with several calls into one message per call, followed by its results."""
    found: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        if len(message.get("tool_calls") or ()) < 2:
            found.append(message)
            continue
        results: dict[Any, list[Message]] = {}
        while index < len(messages) and messages[index]["role"] == "tool":
            results.setdefault(messages[index].get("tool_call_id"), []).append(messages[index])
            index += 1
        for number, call in enumerate(message["tool_calls"]):
            head = message if number == 0 else {"role": "assistant"}
            found += [{**head, "tool_calls": [call]}, *results.pop(call["id"], ())]
        found += [result for rest in results.values() for result in rest]
    return found


def _with_content(message: Message, traits: TemplateTraits) -> Message:
    """Convert an assistant message without text to a form that the template supports."""
    if message["role"] != "assistant" or message.get("content"):
        return message
    form: ContentForm = "missing" if message.get("content") is None else "empty"
    if message.get("tool_calls"):
        better = traits.call_content.get(form)
    elif "reasoning_content" in message:
        better = traits.thought_content.get(form)
    else:
        better = None
    if better is None:
        return message
    if better == "missing":
        return {name: value for name, value in message.items() if name != "content"}
    return {**message, "content": "" if better == "empty" else None}


def _with_system(messages: Sequence[Message], traits: TemplateTraits, takes_system: bool) -> list[Message]:
    """Move system messages that the template does not support to user messages.

    They are prepended to the user's next message, after the results of pending calls, or become a user message.
    takes_system: this conversation may start with a system message.
    """
    num_first = next((index for index, message in enumerate(messages) if not _is_system(message)), len(messages))
    first, rest = list(messages[:num_first]), messages[num_first:]
    if len(first) > 1 and not traits.several_systems:
        first = [_merged(first)]
    waiting: list[Message] = []
    if not takes_system:
        first, waiting = [], first
    if not waiting and traits.later_system:
        return [*first, *rest]
    found = first
    for message in rest:
        if _is_system(message) and not traits.later_system:
            waiting.append(message)
        elif waiting and message["role"] == "user":
            found.append({**message, "content": _text([*waiting, message])})
            waiting = []
        else:
            if waiting and message["role"] == "assistant":
                found.append({"role": "user", "content": _text(waiting)})
                waiting = []
            found.append(message)
    return [*found, {"role": "user", "content": _text(waiting)}] if waiting else found


def _ends_with_result(messages: Sequence[Message]) -> bool:
    """Return True if a tool result follows the last assistant message."""
    return "tool" in _roles_before_assistant(reversed(messages))


def _is_abandoned(following: Sequence[Message]) -> bool:
    """Return True if the conversation continues after a call without its result."""
    return bool(following) and "tool" not in _roles_before_assistant(following)


def _roles_before_assistant(messages: Iterable[Message]) -> Iterable[str]:
    return itertools.takewhile(lambda role: role != "assistant", (message["role"] for message in messages))


def _in_turns(messages: Sequence[Message], traits: TemplateTraits) -> list[Message]:
    """Join consecutive messages of the same role if the template does not support them."""
    found: list[Message] = []
    waiting: list[Message] = []
    """User messages between calls and results; they are moved after the results."""
    for role, group in itertools.groupby(messages, lambda message: message["role"]):
        run = list(group)
        if (role == "user" and not traits.users_in_a_row) or (role == "assistant" and not traits.assistants_in_a_row):
            run = [_merged(run)]
        if role == "user" and found and not traits.user_after_result:
            if found[-1].get("tool_calls"):
                waiting = run
                continue
            if found[-1]["role"] == "tool":
                found[-1] = _merged([found[-1], *run])
                continue
        if role == "assistant" and not traits.assistant_first and all(map(_is_system, found)):
            found.append({"role": "user", "content": ""})
        if waiting and role == "tool":
            run[-1] = _merged([run[-1], *waiting])
        else:
            found += waiting
        waiting = []
        found += run
    return found + waiting


def _merged(messages: Sequence[Message]) -> Message:
    """Join messages into one with the role of the first, and all text, reasoning and calls."""
    if len(messages) == 1:
        return messages[0]
    merged = {**messages[0]}
    if any("content" in message for message in messages):
        merged["content"] = _text(messages)
    if thoughts := [message["reasoning_content"] for message in messages if message.get("reasoning_content")]:
        merged["reasoning_content"] = "\n\n".join(thoughts)
    if calls := [call for message in messages for call in message.get("tool_calls") or ()]:
        merged["tool_calls"] = calls
    return merged


def _text(messages: Iterable[Message]) -> str:
    return "\n\n".join([message["content"] for message in messages if message.get("content")])


def _is_system(message: Message) -> bool:
    return message["role"] in _SYSTEM_ROLES
