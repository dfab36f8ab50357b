"""The fields `tools` and `tool_choice` of `/v1/messages`."""

from typing import Any

import msgspec
from msgspec import Raw, Struct, field

from tandem.frontend.errors import unsupported
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.schema import Schema, array, nullable, of_type
from tandem.frontend.request.tools import (
    MAX_TOOLS,
    FunctionSpec,
    RequestedChoice,
    ToolName,
    ToolUse,
    checked_tools,
    tool_use,
)
from tandem.frontend.request.values import TypedDecoder

MAX_NAMES = 65_536
"""Maximum number of `name` keys in `tools`, including those within schemas."""


class _Tool(Struct):
    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: str | None = None
    cache_control: Raw = field(default_factory=Raw)


class _AnyTool(Struct):
    name: str
    type: str | None = None


class _Mode(Struct):
    disable_parallel_tool_use: bool | None = None


class _Auto(_Mode, tag_field="type", tag="auto"):
    pass


class _Any(_Mode, tag_field="type", tag="any"):
    pass


class _Named(_Mode, tag_field="type", tag="tool", kw_only=True):
    name: str


class _None(_Mode, tag_field="type", tag="none"):
    pass


ToolChoiceBlock = _Auto | _Any | _Named | _None

TOOLS: Schema = nullable(array({"anyOf": [of_type(_Tool), of_type(_AnyTool)]}, MAX_TOOLS))


class OtherTool(Struct, frozen=True):
    """Tool with a schema known only to Anthropic's models and servers."""

    path: str
    type: str
    """Type with its version, for example `web_search_20250305`."""
    name: str


class GivenTools(Struct, frozen=True):
    """Tools of a request: those described by the client, and others."""

    functions: tuple[FunctionSpec, ...] = ()
    others: tuple[OtherTool, ...] = ()


_ANY_DECODER = TypedDecoder(list[_AnyTool])
_DECODER = TypedDecoder(_Tool)


def parse_tools(raw: Raw, ignored: IgnoredFields) -> GivenTools:
    """Parse the tools.

    Raises ApiError 400 for a malformed tool, with its path.
    """
    data = bytes(memoryview(raw))
    # In valid JSON these bytes are a key or a separate string: quotes within text are escaped.
    if (count := data.count(b'"name"')) > MAX_NAMES:
        raise unsupported(f"{{param}} takes at most {MAX_NAMES} keys 'name', not {count}", "tools")
    kinds: list[_AnyTool] = _ANY_DECODER.decode(data, "tools")
    functions: list[FunctionSpec] = []
    others: list[OtherTool] = []
    for index, (kind, tool_data) in enumerate(zip(kinds, msgspec.json.decode(data, type=list[Raw]), strict=True)):
        path = f"tools[{index}]"
        if kind.type not in (None, "custom"):
            others.append(OtherTool(path, kind.type, kind.name))
            continue
        tool: _Tool = _DECODER.read(tool_data, path, ignored)
        functions.append(FunctionSpec(tool.name, tool.description, tool.input_schema, tool.strict))
    return GivenTools(tuple(functions), tuple(others))


def messages_tool_use(given: GivenTools, choice: ToolChoiceBlock | None, ignored: IgnoredFields) -> ToolUse:
    """Build the tool use from the tools and the tool choice.

    Tools defined by Anthropic are dropped and recorded as ignored. Raises ApiError 400 if the choice may force a call
    of them, for invalid tools, and for an unknown tool.
    """
    for tool in given.others:
        if isinstance(choice, _Any) or (isinstance(choice, _Named) and choice.name == tool.name):
            raise unsupported(
                f"{{param}} forces a call, but this server does not have the tool {tool.type[:80]!r}; leave it out of "
                "'tools', or give a tool with 'input_schema'",
                "tool_choice",
            )
        ignored.add(f"{tool.path}.{tool.type}")
    parallel = choice is None or not choice.disable_parallel_tool_use
    return tool_use(checked_tools(given.functions, "name", schema_key="input_schema"), _requested(choice), parallel)


def _requested(choice: ToolChoiceBlock | None) -> RequestedChoice | None:
    match choice:
        case None:
            return None
        case _Named(name=name):
            return RequestedChoice("required", name=name)
        case _Any():
            return RequestedChoice("required")
        case _Auto():
            return RequestedChoice("auto")
        case _None():
            return RequestedChoice("none")
