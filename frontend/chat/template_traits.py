"""Determine which messages a chat template supports, and which must be adapted.

Some templates have no system role, some require user and assistant to alternate, some fail on a call without text.
Each probe renders a conversation and checks that its texts are in the output.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal

from msgspec import Struct

Message = dict[str, Any]
ContentForm = Literal["missing", "null", "empty"]
"""Content of a message without text: no field `content`, null, or ""."""

Render = Callable[[Sequence[Message], Sequence[Message]], Awaitable[str]]
"""Function that renders messages and tools; "" if the template rejects them."""

_FORMS: tuple[ContentForm, ...] = ("empty", "null", "missing")
"""Replacements in order of preference."""
_CONTENTS: dict[ContentForm, Message] = {"missing": {}, "null": {"content": None}, "empty": {"content": ""}}
_UNKNOWN_ROLE = "proberole"
_SHORT_ID, _OTHER_SHORT_ID, _LONG_ID = "probecall", "probeback", "call_probe_0123456789"
_PARAMETERS = {
    "type": "object",
    "properties": {"argument": {"type": "string", "description": "A word."}},
    "required": ["argument"],
}
_TOOLS: Sequence[Message] = (
    {"type": "function", "function": {"name": "probetool", "description": "A tool.", "parameters": _PARAMETERS}},
)


class TemplateTraits(Struct, frozen=True):
    """Traits of a template. By default it supports all messages."""

    tools: bool = True
    """True if the output depends on the tools."""
    exchanges: bool = True
    """True if tool calls and their results are rendered."""
    arguments_are_text: bool = False
    """True if arguments of a call must be JSON text instead of an object."""
    any_arguments: bool = True
    """True if arguments that are not a JSON object are rendered, as a truncated call may leave them."""
    parallel_calls: bool = True
    """True if a message may have several calls; otherwise each is followed by its result."""
    any_call_id: bool = True
    """True if calls may have any id; otherwise ids have nine letters and digits."""
    calls_with_text: Literal["kept", "split", "as text"] = "kept"
    """Handling of calls in a message with text: unchanged, in a separate message, or as text."""
    call_content: dict[ContentForm, ContentForm] = {}
    """Maps unsupported content of calls without text to supported content."""
    thought_content: dict[ContentForm, ContentForm] = {}
    """The same for messages with reasoning only."""
    developer: bool = True
    """True if the template has a role `developer`."""
    system: bool = True
    """True if an initial system message is rendered."""
    several_systems: bool = True
    """True if several initial system messages are rendered."""
    lone_system: bool = True
    """True if a system message is rendered without a user message."""
    lone_system_with_tools: bool = True
    """The same with tools."""
    system_before_result: bool = True
    """True if a system message is rendered while the last message is the result of a call."""
    later_system: bool = True
    """True if system messages are rendered anywhere."""
    users_in_a_row: bool = True
    assistants_in_a_row: bool = True
    assistant_first: bool = True
    """True if the assistant may start the conversation."""
    user_after_result: bool = True
    """True if a user message may follow the result of a call."""


async def probe_traits(render: Render, needs_tools: bool) -> TemplateTraits:
    """Determine the traits of a template.

    needs_tools: the template is only used with tools, so every probe includes some. If a template fails on a single
    question or does not render it, returns the default traits.
    """
    probe = _Probe(render, _TOOLS if needs_tools else ())
    if not await probe.shows([_user(1)], "user1"):
        return TemplateTraits(developer=False)
    system = await probe.shows([_system(1), _user(1)], "system1", "user1")
    tools = await probe.reads_tools(system)
    developer = await probe.knows_developer()
    roles = ("system", "developer") if developer else ("system",)
    return TemplateTraits(
        tools=tools,
        **await probe.exchanges(),
        thought_content=await probe.thought_content(),
        developer=developer,
        system=system,
        several_systems=system and all([await probe.takes_several(first, last) for first in roles for last in roles]),
        lone_system=system and await probe.shows([_system(1)], "system1"),
        lone_system_with_tools=system and await probe.shows([_system(1)], "system1", tools=_TOOLS if tools else ()),
        later_system=all([await probe.takes_later(role) for role in roles]),
        users_in_a_row=await probe.shows(
            [_user(1), _user(2), _assistant(1), _user(3), _user(4)], "user1", "user2", "user3", "user4"
        ),
        assistants_in_a_row=await probe.shows(
            [_user(1), _assistant(1), _assistant(2), _user(2)], "assistant1", "assistant2", "user2"
        ),
        # Determines whether an empty question is prepended.
        assistant_first=await probe.shows([_assistant(1), _user(1)], "assistant1", "user1")
        or not await probe.shows([{"role": "user", "content": ""}, _assistant(1), _user(1)], "assistant1", "user1"),
    )


class _Probe:
    """Renderer of the probes of a template."""

    def __init__(self, render: Render, tools: Sequence[Message]) -> None:
        self._render = render
        self._tools = tools
        """Default tools of the probes."""
        self._nones: dict[bool, int] = {}
        """Occurrences of the word None in a question's output, with and without tools."""

    async def output(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """Render messages; return "" if the template rejects them."""
        return await self._render(messages, tools or self._tools)

    async def shows(self, messages: Sequence[Message], *names: str, tools: Sequence[Message] = ()) -> bool:
        """Return True if the output contains the texts of these names."""
        return _has(await self.output(messages, tools), names)

    async def reads_tools(self, has_system: bool) -> bool:
        """Return True if tools change the output, with and without a system message before the question."""
        for messages in ([_user(1)], [_system(1), _user(1)])[: 1 + has_system]:
            shown = await self.output(messages, _TOOLS)
            if not _has(shown, ["user1"]):
                return False
            if shown == await self.output(messages) and not self._tools:
                return False
        return True

    async def knows_developer(self) -> bool:
        """Return True if the role `developer` is treated differently from an unknown role."""
        shown = await self.output([_text("developer", 1), _user(1)])
        unknown = await self.output([{**_text("developer", 1), "role": _UNKNOWN_ROLE}, _user(1)])
        return _has(shown, ["developer1"]) and shown != unknown.replace(_UNKNOWN_ROLE, "developer")

    async def takes_several(self, first: str, last: str) -> bool:
        return await self.shows([_text(first, 1), _text(last, 2), _user(1)], f"{first}1", f"{last}2", "user1")

    async def takes_later(self, role: str) -> bool:
        later = [_text(role, number) for number in range(3)]
        return await self.shows(
            [_user(1), later[0], _assistant(1), later[1], _user(2), later[2]],
            *(f"{role}{number}" for number in range(3)),
            *("user1", "assistant1", "user2"),
        )

    async def thought_content(self) -> dict[ContentForm, ContentForm]:
        """Determine replacements for unsupported content of messages with only reasoning."""
        taken = []
        for form, content in _CONTENTS.items():
            thought = {"role": "assistant", "reasoning_content": _word("thought1"), **content}
            shown = await self.output([_user(1), thought, _user(2)])
            if _has(shown, ["user1", "user2"]) and not await self._prints_none(shown, ()):
                taken.append(form)
        return _replacements(taken)

    async def exchanges(self) -> dict[str, Any]:
        """Determine the traits of calls and results."""
        for as_text in (False, True):
            if taken := await self._call_contents(as_text):
                return {
                    "arguments_are_text": as_text,
                    "call_content": _replacements(taken),
                    **await self._calls(as_text, _CONTENTS[next(form for form in _FORMS if form in taken)]),
                }
        return {"exchanges": False}

    async def _call_contents(self, as_text: bool) -> list[ContentForm]:
        """Return the forms of content with which a call and its result are rendered."""
        shown_with: list[ContentForm] = []
        shown_with_thought: list[ContentForm] = []
        for form, content in _CONTENTS.items():
            call = {**_calls(as_text, _SHORT_ID), **content}
            shown = await self.output([_user(1), call, _result(1, _SHORT_ID)], _TOOLS)
            if not _has(shown, ["user1", "call1", "argument1", "result1"]) or await self._prints_none(shown, _TOOLS):
                continue
            shown_with.append(form)
            call["reasoning_content"] = _word("thought1")
            if _has(await self.output([_user(1), call, _result(1, _SHORT_ID)], _TOOLS), ["call1"]):
                shown_with_thought.append(form)
        return shown_with_thought or shown_with

    async def _calls(self, as_text: bool, content: Message) -> dict[str, Any]:
        """Determine the other traits of calls, given a supported form of content."""
        call, result = {**_calls(as_text, _SHORT_ID), **content}, _result(1, _SHORT_ID)
        names = ("user1", "call1", "argument1", "result1")
        both = {**_calls(as_text, _SHORT_ID, _OTHER_SHORT_ID), **content}
        other = {**_calls(as_text, _OTHER_SHORT_ID, first=2), **content}
        other_result = _result(2, _OTHER_SHORT_ID)
        all_names = (*names, "call2", "argument2", "result2")
        cut = {**_calls(True, _SHORT_ID), **content}
        cut["tool_calls"][0]["function"]["arguments"] = _word("argument1")
        long = [_user(1), {**_calls(as_text, _LONG_ID), **content}, _result(1, _LONG_ID)]
        return {
            "parallel_calls": await self.shows([_user(1), both, result, other_result], *all_names, tools=_TOOLS)
            or not await self.shows([_user(1), call, result, other, other_result], *all_names, tools=_TOOLS),
            "any_arguments": await self.shows([_user(1), cut, result], *names, tools=_TOOLS),
            "any_call_id": await self.shows(long, *names, tools=_TOOLS),
            "system_before_result": await self.shows(
                [_system(1), _user(1), call, result], *names, "system1", tools=_TOOLS
            ),
            "calls_with_text": await self._calls_with_text(call, result),
            "user_after_result": await self.shows([_user(1), call, result, _user(2)], *names, "user2", tools=_TOOLS),
        }

    async def _calls_with_text(self, call: Message, result: Message) -> Literal["kept", "split", "as text"]:
        if await self.shows([_user(1), {**call, **_assistant(1)}, result], "call1", tools=_TOOLS):
            return "kept"
        split = [_user(1), _assistant(1), call, result, _assistant(2), _user(2)]
        names = ("assistant1", "call1", "result1", "assistant2", "user2")
        return "split" if await self.shows(split, *names, tools=_TOOLS) else "as text"

    async def _prints_none(self, shown: str, tools: Sequence[Message]) -> bool:
        """Return True if null content was rendered as the word None."""
        if bool(tools) not in self._nones:
            self._nones[bool(tools)] = (await self.output([_user(1)], tools)).count("None")
        return shown.count("None") > self._nones[bool(tools)]


def _replacements(taken: Sequence[ContentForm]) -> dict[ContentForm, ContentForm]:
    """Map unsupported content to a supported form, if any."""
    better = next((form for form in _FORMS if form in taken), None)
    return {} if better is None else {form: better for form in _FORMS if form not in taken}


def _has(shown: str, names: Iterable[str]) -> bool:
    return bool(shown) and all(_word(name) in shown for name in names)


def _word(name: str) -> str:
    """Return a unique word for a probe, which no template writes itself and which is not part of another word."""
    return f"probe{name}end"


def _text(role: str, number: int) -> Message:
    return {"role": role, "content": _word(f"{role}{number}")}


def _user(number: int) -> Message:
    return _text("user", number)


def _assistant(number: int) -> Message:
    return _text("assistant", number)


def _system(number: int) -> Message:
    return _text("system", number)


def _calls(as_text: bool, *ids: str, first: int = 1) -> Message:
    calls = []
    for number, call_id in enumerate(ids, first):
        value = _word(f"argument{number}")
        arguments = f'{{"argument": "{value}"}}' if as_text else {"argument": value}
        function = {"name": _word(f"call{number}"), "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
    return {"role": "assistant", "tool_calls": calls}


def _result(number: int, call_id: str) -> Message:
    return {"role": "tool", "content": _word(f"result{number}"), "tool_call_id": call_id}
