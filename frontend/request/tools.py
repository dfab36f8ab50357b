"""The fields `tools`, `tool_choice` and `parallel_tool_calls` of requests."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tandem.frontend.errors import malformed, unsupported
from tandem.frontend.request.fields import Field
from tandem.frontend.request.kinds import Boolean, Typed
from tandem.frontend.request.schema import array, nullable, of_type

MAX_TOOLS = 512
MAX_NAME_CHARS = 64

ToolName = Annotated[str, Meta(extra_json_schema={"pattern": "^[a-zA-Z0-9_.-]+$", "maxLength": MAX_NAME_CHARS})]
"""A function's name as `/openapi.json` describes it; `checked_tools` checks it, with an error that names its path."""


class Tool(Struct, frozen=True):
    """A function that the model may call, validated."""

    name: str
    parameters: dict[str, Any] | None
    """JSON Schema of the arguments; None if the request gives none."""
    strict: bool
    template_form: dict[str, Any]
    """The tool as the chat template gets it."""


class ToolChoice(Struct, frozen=True):
    """Mode of calling tools.

    With mode "required", `name` may be the one function that must be called.
    """

    mode: Literal["none", "auto", "required"] = "none"
    name: str | None = None


class ToolUse(Struct, frozen=True):
    """The tools of a request that its choice allows, and how they may be called."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel: bool = True

    @property
    def active(self) -> bool:
        """True if the output may contain calls."""
        return self.choice.mode != "none"

    @property
    def template_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools as the chat template gets them."""
        return tuple(tool.template_form for tool in self.tools) if self.active else ()


class FunctionSpec(Struct):
    """A function as a request describes it."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class RequestedChoice(Struct, frozen=True):
    """The content of `tool_choice`.

    It is a mode, one function by its name, or a mode with some of the functions.
    """

    mode: Literal["none", "auto", "required"]
    name: str | None = None
    allowed: tuple[str, ...] | None = None


class _Tool(Struct):
    type: Literal["function"]
    function: FunctionSpec


class _Named(Struct):
    name: str


class _NamedChoice(Struct, tag_field="type", tag="function"):
    function: _Named


class _NamedTool(Struct):
    type: Literal["function"]
    function: _Named


class _Allowed(Struct):
    mode: Literal["auto", "required"]
    tools: list[_NamedTool]


class _AllowedChoice(Struct, tag_field="type", tag="allowed_tools"):
    allowed_tools: _Allowed


_Choice = Literal["none", "auto", "required"] | _NamedChoice | _AllowedChoice


PARALLEL_FIELD = Field("parallel_tool_calls", Boolean(True), "Allow several calls in one answer.")
TOOL_FIELDS = (
    Field(
        "tools", Typed(list[_Tool], nullable(array(of_type(_Tool), MAX_TOOLS))), "Functions that the model may call."
    ),
    Field("tool_choice", Typed(_Choice), "Which functions may or must be called."),
    PARALLEL_FIELD,
)


def chat_tool_use(values: Mapping[str, Any]) -> ToolUse:
    """Build the tool use from the parsed fields of a chat.

    Raises ApiError 400 for invalid tools, or for a choice of a tool that is missing.
    """
    found: list[_Tool] = values["tools"] or []
    tools = checked_tools([tool.function for tool in found], "function.name")
    return tool_use(tools, _requested(values["tool_choice"]), values["parallel_tool_calls"])


def _requested(choice: Any) -> RequestedChoice | None:
    match choice:
        case None:
            return None
        case _NamedChoice(function=function):
            return RequestedChoice("required", name=function.name)
        case _AllowedChoice(allowed_tools=allowed):
            return RequestedChoice(allowed.mode, allowed=tuple(tool.function.name for tool in allowed.tools))
        case mode:
            return RequestedChoice(mode)


def tool_use(tools: tuple[Tool, ...], choice: RequestedChoice | None, parallel: bool) -> ToolUse:
    """Combine tools with the choice among them.

    Raises ApiError 400 for a choice that allows no tool, and for a choice of a tool that is missing.
    """
    if not tools:
        if choice is not None and choice not in (RequestedChoice("none"), RequestedChoice("auto")):
            raise unsupported(
                "{param} requires a call, but the request has no 'tools'; give at least one", "tool_choice"
            )
        return ToolUse(parallel=parallel)
    choice = choice or RequestedChoice("auto")
    known = {tool.name for tool in tools}
    if choice.name is not None:
        _check_known([choice.name], known)
    if choice.allowed is not None:
        _check_known(choice.allowed, known)
        tools = tuple(tool for tool in tools if tool.name in choice.allowed)
    return ToolUse(tools, ToolChoice(choice.mode, choice.name), parallel)


def checked_tools(functions: Sequence[FunctionSpec], name_path: str) -> tuple[Tool, ...]:
    """Validate the functions of `tools`.

    Raises ApiError 400 for too many functions, and with the path of a name that is invalid or not unique. `name_path`
    is the path of the name within an element of `tools`.
    """
    if len(functions) > MAX_TOOLS:
        raise unsupported(f"{{param}} takes at most {MAX_TOOLS} tools, not {len(functions)}", "tools")
    names: set[str] = set()
    for index, function in enumerate(functions):
        name, path = function.name, f"tools[{index}].{name_path}"
        if not _is_name(name):
            raise unsupported(
                f"{{param}} must have 1 to {MAX_NAME_CHARS} letters, digits, '_', '-' or '.', not {name[:80]!r}", path
            )
        if name in names:
            raise unsupported(f"{{param}}: two tools are named {name!r}; give each its own name", path)
        names.add(name)
    return tuple(_tool(function) for function in functions)


def _tool(function: FunctionSpec) -> Tool:
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    if function.parameters is not None:
        described["parameters"] = function.parameters
    return Tool(function.name, function.parameters, bool(function.strict), {"type": "function", "function": described})


def _is_name(name: str) -> bool:
    return 1 <= len(name) <= MAX_NAME_CHARS and name.isascii() and name.translate(_PUNCTUATION).isalnum()


_PUNCTUATION = str.maketrans("_.-", "aaa")


def _check_known(names: Sequence[str], known: set[str]) -> None:
    if not names:
        raise malformed("{param} allows no tool; name at least one", "tool_choice")
    for name in names:
        if name not in known:
            raise unsupported(f"{{param}} names {name[:80]!r}, which is not among 'tools'", "tool_choice")
