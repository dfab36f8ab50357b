"""The fields `tools`, `tool_choice` and `parallel_tool_calls` of requests."""

from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from tandem.frontend.errors import malformed, unsupported
from tandem.frontend.request.field_types import Boolean, Typed
from tandem.frontend.request.fields import Field
from tandem.frontend.request.schema import array, nullable, of_type

MAX_TOOLS = 512
MAX_TOOLS_BYTES = 1024 * 1024
"""Maximum bytes of JSON of all tools, enough for many MCP servers."""
MAX_NAME_CHARS = 256

ToolName = Annotated[str, Meta(extra_json_schema={"pattern": "^[a-zA-Z0-9_.:/-]+$", "maxLength": MAX_NAME_CHARS})]
"""Schema of a function's name; `checked_tools` validates it, with an error that has its path."""


class Tool(Struct, frozen=True):
    """Validated function that the model may call."""

    name: str
    parameters: dict[str, Any] | None
    """JSON Schema of the arguments; None if not given."""
    strict: bool
    template_form: dict[str, Any]
    """Tool in the format of chat templates."""
    path: str = "tools[].parameters"
    """Path of the schema in the request."""
    strict_by_default: bool = False
    """True if the tool is not declared strict: unsupported parts of its schema are then removed."""


class ToolChoice(Struct, frozen=True):
    """Tool calling mode.

    With mode "required", `name` may be a function that must be called.
    """

    mode: Literal["none", "auto", "required"] = "none"
    name: str | None = None


class ToolUse(Struct, frozen=True):
    """Allowed tools of a request, and how they may be called."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel: bool = True
    as_functions: bool = False
    """True if the request has `functions` instead of tools, so that the response has `function_call`."""

    @property
    def active(self) -> bool:
        """True if the output may contain calls."""
        return self.choice.mode != "none"

    @property
    def template_tools(self) -> tuple[dict[str, Any], ...]:
        """Tools in the format of chat templates."""
        return tuple(tool.template_form for tool in self.tools) if self.active else ()


class FunctionSpec(Struct):
    """Function in a request."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class RequestedChoice(Struct, frozen=True):
    """The content of `tool_choice`.

    It is a mode, a function by name, or a mode with a subset of the functions.
    """

    mode: Literal["none", "auto", "required"]
    name: str | None = None
    allowed: tuple[str, ...] | None = None


class _Tool(Struct):
    function: FunctionSpec
    type: Literal["function"] = "function"


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


_Choice = Literal["none", "auto", "required", "any"] | _NamedChoice | _AllowedChoice


_FunctionChoice = Literal["none", "auto"] | _Named
PARALLEL_FIELD = Field("parallel_tool_calls", Boolean(True), "Allow several calls in one answer.")
TOOL_FIELDS = (
    Field(
        "tools",
        Typed(list[_Tool], nullable(array(of_type(_Tool), MAX_TOOLS)), MAX_TOOLS_BYTES),
        "Functions that the model may call.",
    ),
    Field("tool_choice", Typed(_Choice), "Which functions may or must be called; `any` means `required`."),
    PARALLEL_FIELD,
    Field(
        "functions",
        Typed(list[FunctionSpec], nullable(array(of_type(FunctionSpec), MAX_TOOLS)), MAX_TOOLS_BYTES),
        "The old form of `tools`; the answer has the old form of a call.",
        extra={"deprecated": True},
    ),
    Field("function_call", Typed(_FunctionChoice), "The old form of `tool_choice`.", extra={"deprecated": True}),
)


def chat_tool_use(values: Mapping[str, Any]) -> ToolUse:
    """Build the tool use from the parsed fields of a chat.

    Raises ApiError 400 for invalid tools, or for a choice of a tool that is missing.
    """
    found: list[_Tool] = values["tools"] or []
    if not found and values["functions"]:
        return _function_use(values["functions"], values["function_call"])
    tools = checked_tools([tool.function for tool in found], "function.name")
    return tool_use(tools, _requested(values["tool_choice"]), values["parallel_tool_calls"])


def _function_use(functions: Sequence[FunctionSpec], choice: Any) -> ToolUse:
    """Build the tool use of `functions`, which allow at most one call."""
    requested = RequestedChoice("required", name=choice.name) if isinstance(choice, _Named) else _requested(choice)
    use = tool_use(checked_tools(functions, "name", "functions"), requested, False, "function_call")
    return structs.replace(use, as_functions=True)


def _requested(choice: Any) -> RequestedChoice | None:
    match choice:
        case None:
            return None
        case _NamedChoice(function=function):
            return RequestedChoice("required", name=function.name)
        case _AllowedChoice(allowed_tools=allowed):
            return RequestedChoice(allowed.mode, allowed=tuple(tool.function.name for tool in allowed.tools))
        case "any":
            return RequestedChoice("required")
        case mode:
            return RequestedChoice(mode)


def tool_use(
    tools: tuple[Tool, ...], choice: RequestedChoice | None, parallel: bool, field: str = "tool_choice"
) -> ToolUse:
    """Combine tools with the choice among them.

    Raises ApiError 400 for a choice that allows no tool, and for an unknown tool; `field` is the name of the choice.
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
        _check_known([choice.name], known, field)
    if choice.allowed is not None:
        _check_known(choice.allowed, known, field)
        tools = tuple(tool for tool in tools if tool.name in choice.allowed)
    return ToolUse(tools, ToolChoice(choice.mode, choice.name), parallel)


def checked_tools(
    functions: Sequence[FunctionSpec],
    name_path: str,
    field: str = "tools",
    schema_key: str = "parameters",
    strict_by_default: Set[str] = frozenset(),
) -> tuple[Tool, ...]:
    """Validate the functions of a field, by default `tools`.

    Raises ApiError 400 for too many functions, and with the path of an invalid or duplicate name. name_path: path of
    the name within an element; `schema_key` is next to it. strict_by_default: names of functions with an unset
    `strict`.
    """
    if len(functions) > MAX_TOOLS:
        raise unsupported(f"{{param}} takes at most {MAX_TOOLS} tools, not {len(functions)}", field)
    names: set[str] = set()
    for index, function in enumerate(functions):
        name, path = function.name, f"{field}[{index}].{name_path}"
        if not _is_name(name):
            raise unsupported(
                f"{{param}} must have 1 to {MAX_NAME_CHARS} letters, digits, or any of '_-.:/', not {name[:80]!r}",
                path,
            )
        if name in names:
            raise unsupported(f"{{param}}: two tools are named {name!r}; give each its own name", path)
        names.add(name)
    schema_path = name_path.removesuffix("name") + schema_key
    return tuple(
        _tool(function, f"{field}[{index}].{schema_path}", function.name in strict_by_default)
        for index, function in enumerate(functions)
    )


def _tool(function: FunctionSpec, path: str, strict_by_default: bool) -> Tool:
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    if function.parameters is not None:
        described["parameters"] = function.parameters
    form = {"type": "function", "function": described}
    return Tool(function.name, function.parameters, bool(function.strict), form, path, strict_by_default)


def _is_name(name: str) -> bool:
    return 1 <= len(name) <= MAX_NAME_CHARS and name.isascii() and name.translate(_PUNCTUATION).isalnum()


_PUNCTUATION = str.maketrans("_.-:/", "aaaaa")


def _check_known(names: Sequence[str], known: set[str], field: str) -> None:
    if not names:
        raise malformed("{param} allows no tool; name at least one", field)
    for name in names:
        if name not in known:
            raise unsupported(f"{{param}} names {name[:80]!r}, which is not among the tools of the request", field)
