"""The fields `tools`, `tool_choice` and `parallel_tool_calls`."""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from tandem.frontend.errors import malformed, unsupported
from tandem.frontend.request.fields import FieldReader

MAX_TOOLS = 512
MAX_NAME_CHARS = 64


class Tool(Struct, frozen=True):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] | None
    """JSON schema of the arguments; None where nothing is said of them."""
    strict: bool
    shown: dict[str, Any]
    """What the chat template gets."""


class ToolChoice(Struct, frozen=True):
    """What may or must be called. `name` is the one function that must be, with mode "required"."""

    mode: Literal["none", "auto", "required"] = "none"
    name: str | None = None


class ToolUse(Struct, frozen=True):
    """The tools of a request, of those allowed by the choice, and how they may be called."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel: bool = True

    @property
    def active(self) -> bool:
        """Whether the output may hold calls."""
        return self.choice.mode != "none"


class Function(Struct, forbid_unknown_fields=True):
    """A function as requests describe it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Wanted(Struct, frozen=True):
    """What `tool_choice` asks for: a mode, one function by its name, or a mode with some functions alone."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None
    allowed: tuple[str, ...] | None = None


class _Tool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class _Named(Struct, forbid_unknown_fields=True):
    name: str


class _NamedChoice(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: _Named


class _NamedTool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Named


class _Allowed(Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[_NamedTool]


class _AllowedChoice(Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    allowed_tools: _Allowed


_Choice = Literal["none", "auto", "required"] | _NamedChoice | _AllowedChoice


def read_tool_use(fields: FieldReader) -> ToolUse:
    """Takes the three fields. Raises ApiError 400 for another shape, 422 for what is not supported."""
    found: list[_Tool] = fields.shaped("tools", list[_Tool]) or []
    tools = checked_tools([tool.function for tool in found], "function.name")
    choice = fields.shaped("tool_choice", _Choice)
    return tool_use(tools, _wanted(choice), fields.boolean("parallel_tool_calls", True))


def _wanted(choice: Any) -> Wanted | None:
    match choice:
        case None:
            return None
        case _NamedChoice(function=function):
            return Wanted("required", name=function.name)
        case _AllowedChoice(allowed_tools=allowed):
            return Wanted(allowed.mode, allowed=tuple(tool.function.name for tool in allowed.tools))
        case mode:
            return Wanted(mode)


def tool_use(tools: tuple[Tool, ...], wanted: Wanted | None, parallel: bool) -> ToolUse:
    """Raises ApiError 422 where a call is wanted of a tool that is not there."""
    if not tools:
        if wanted is not None and wanted not in (Wanted("none"), Wanted("auto")):
            raise unsupported("'tool_choice' asks for a call, but there are no 'tools'", "tool_choice")
        return ToolUse(parallel=parallel)
    wanted = wanted or Wanted("auto")
    known = {tool.name for tool in tools}
    if wanted.name is not None:
        _check_known([wanted.name], known)
    if wanted.allowed is not None:
        _check_known(wanted.allowed, known)
        tools = tuple(tool for tool in tools if tool.name in wanted.allowed)
    return ToolUse(tools, ToolChoice(wanted.mode, wanted.name), parallel)


def checked_tools(functions: Sequence[Function], place_of_name: str) -> tuple[Tool, ...]:
    """`place_of_name` is where in each of `tools` its name stands. Raises ApiError 422 for what no tool can be."""
    if len(functions) > MAX_TOOLS:
        raise unsupported(f"'tools' takes at most {MAX_TOOLS} tools, not {len(functions)}", "tools")
    names: set[str] = set()
    for index, function in enumerate(functions):
        name, place = function.name, f"tools[{index}].{place_of_name}"
        if not _is_name(name):
            raise unsupported(
                f"{place!r} must have 1 to {MAX_NAME_CHARS} letters, digits, '_', '-' or '.', not {name[:80]!r}", place
            )
        if name in names:
            raise unsupported(f"{place!r}: there are two tools named {name!r}", place)
        names.add(name)
    return tuple(_tool(function) for function in functions)


def _tool(function: Function) -> Tool:
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    if function.parameters is not None:
        shown["parameters"] = function.parameters
    return Tool(function.name, function.parameters, bool(function.strict), {"type": "function", "function": shown})


def _is_name(name: str) -> bool:
    return 1 <= len(name) <= MAX_NAME_CHARS and name.isascii() and name.translate(_OTHERS).isalnum()


_OTHERS = str.maketrans("_.-", "aaa")


def _check_known(names: Sequence[str], known: set[str]) -> None:
    if not names:
        raise malformed("'tool_choice' allows no tool; name at least one", "tool_choice")
    for name in names:
        if name not in known:
            raise unsupported(f"'tool_choice' names {name[:80]!r}, which is not among 'tools'", "tool_choice")
