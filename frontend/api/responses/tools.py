"""Convert the tools of a response to functions with names that a model can write.

A custom tool becomes a function with one string argument; a tool of a namespace becomes a function with both names.
Tools hosted by OpenAI are dropped and recorded as ignored.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from tandem.frontend.errors import malformed, unsupported
from tandem.frontend.grammar.json_schema import SchemaError, check_schema
from tandem.frontend.grammar.references import check_references
from tandem.frontend.grammar.relaxed_schema import rewrite_schema
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.schema import Schema, array, nullable, of_type
from tandem.frontend.request.tools import MAX_NAME_CHARS, MAX_TOOLS, MAX_TOOLS_BYTES, FunctionSpec, Tool, checked_tools
from tandem.frontend.request.values import TypedDecoder

CUSTOM_ARGUMENT = "input"
"""Name of the only argument of a function that represents a custom tool."""
_DIGEST_CHARS = 8
_UNHELD = re.compile(r"\(\?(?!:)|(?<!\\)[\^$](?![^\[]*\])|\\[bBAzZ1-9]")
"""Parts of a regex that cannot be enforced within a JSON string: look-around, anchors, backreferences."""
_UNUSUAL = re.compile(r"[^A-Za-z0-9_.:/-]")


class ToolName(Struct, frozen=True):
    """Name of a tool in the request."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class ResponseTools(Struct, frozen=True):
    """Supported tools of a request."""

    tools: tuple[Tool, ...] = ()
    names: Mapping[str, ToolName] = {}
    """Maps names that the model writes to the client's names."""
    described: tuple[dict[str, Any], ...] = ()
    """Tools as the response echoes them."""
    hosted: tuple[str, ...] = ()
    """Types of the dropped tools."""
    written: Mapping[tuple[str, str | None], str] = {}
    """Maps the client's name and namespace to the name that the model writes.

    The key `(name, None)` means the tool without a namespace, or else the first with this name."""

    def model_name(self, name: str, namespace: str | None = None) -> str:
        """Return the name that the model writes for a tool.

        For unknown tools it is derived: earlier calls may name a tool that the request no longer has.
        """
        return self.written.get((name, namespace)) or _model_name(name, namespace, ())


class ToolSpecs(Struct, frozen=True):
    """Tools in one field of a request."""

    tools: tuple[tuple["_Function | _Custom | _Namespace", str], ...] = ()
    """Tools with their paths in the request."""
    hosted: tuple[str, ...] = ()
    """Types of the dropped tools."""


class _Function(FunctionSpec, tag_field="type", tag="function"):
    pass


class _PlainFormat(Struct, tag_field="type", tag="text"):
    pass


class _GrammarFormat(Struct, tag_field="type", tag="grammar"):
    syntax: Literal["lark", "regex"]
    definition: str


class _Custom(Struct, tag_field="type", tag="custom"):
    name: str
    description: str | None = None
    format: _PlainFormat | _GrammarFormat | None = None


class _Namespace(Struct, tag_field="type", tag="namespace"):
    name: str
    tools: list[_Function | _Custom]
    description: str | None = None


class _Typed(Struct):
    type: str


_Tool = _Function | _Custom | _Namespace
_TYPE_DECODER = TypedDecoder(_Typed)
_LIST_DECODER = TypedDecoder(list[Raw])
_DECODERS = {str(kind.__struct_config__.tag): TypedDecoder(kind) for kind in (_Function, _Custom, _Namespace)}
_HOSTED: Schema = {
    "type": "object",
    "properties": {"type": {"type": "string", "not": {"enum": [*_DECODERS]}}},
    "required": ["type"],
}
TOOLS: Schema = nullable(
    array({"anyOf": [*(of_type(kind) for kind in (_Function, _Custom, _Namespace)), _HOSTED]}, MAX_TOOLS)
)
"""Value of `tools`."""


class _Writer:
    """Collect the tools of one request."""

    def __init__(self, ignored: IgnoredFields) -> None:
        self._ignored = ignored
        self.functions: list[FunctionSpec] = []
        self.strict_by_default: set[str] = set()
        """Names of functions constrained to the supported part of their schemas."""
        self.names: dict[str, ToolName] = {}
        self.described: list[dict[str, Any]] = []

    def add(self, tool: _Tool, path: str) -> None:
        """Add a tool, or all tools of a namespace.

        Raises ApiError 400 if a name is empty or not unique.
        """
        if isinstance(tool, _Namespace):
            self.described.append(msgspec.to_builtins(tool))
            for index, inner in enumerate(tool.tools):
                intro = tool.description if index == 0 else None
                self._add(inner, f"{path}.tools[{index}]", tool.name, intro)
        else:
            self.described.append(_described(tool))
            self._add(tool, path, None, None)

    def drop(self, specs: ToolSpecs) -> None:
        """Drop the tools that `specs` redefines."""
        redefined = {
            (inner.name, tool.name if isinstance(tool, _Namespace) else None)
            for tool, _ in specs.tools
            for inner in (tool.tools if isinstance(tool, _Namespace) else [tool])
        }
        dropped = {name for name, known in self.names.items() if (known.name, known.namespace) in redefined}
        self.functions = [function for function in self.functions if function.name not in dropped]
        self.names = {name: known for name, known in self.names.items() if name not in dropped}

    def _add(self, tool: _Function | _Custom, path: str, namespace: str | None, intro: str | None) -> None:
        if not tool.name:
            raise malformed("{param} must have at least 1 character", f"{path}.name")
        is_custom = isinstance(tool, _Custom)
        known = ToolName(tool.name, namespace, is_custom)
        if any((other.name, other.namespace) == (tool.name, namespace) for other in self.names.values()):
            raise unsupported(
                f"{{param}}: two tools are named {tool.name[:80]!r}; give each its own name", f"{path}.name"
            )
        name = _model_name(tool.name, namespace, self.names)
        self.names[name] = known
        spec = self._custom(tool, path) if isinstance(tool, _Custom) else tool
        described = "\n\n".join([text for text in (intro, spec.description) if text]) or None
        self.functions.append(FunctionSpec(name, described, spec.parameters, _strict(spec)))
        if is_custom or spec.strict is None:
            self.strict_by_default.add(name)

    def _custom(self, tool: _Custom, path: str) -> FunctionSpec:
        """Describe a custom tool as a function.

        A regex is enforced on the argument. A Lark grammar cannot be enforced within a JSON string and is only part of
        the description.
        """
        argument: dict[str, Any] = {"type": "string"}
        description = tool.description
        if isinstance(tool.format, _GrammarFormat):
            syntax, definition = tool.format.syntax, tool.format.definition
            note = f"The input must match this {'Lark grammar' if syntax == 'lark' else 'regular expression'}:"
            description = "\n\n".join([*([description] if description else []), f"{note}\n{definition}"])
            if syntax == "regex" and _UNHELD.search(body := _unanchored(definition)) is None:
                argument["pattern"] = f"^(?:{body})$"
            else:
                self._ignored.add(f"{path}.format")
        parameters = {
            "type": "object",
            "properties": {CUSTOM_ARGUMENT: argument},
            "required": [CUSTOM_ARGUMENT],
            "additionalProperties": False,
        }
        return FunctionSpec(tool.name, description, parameters, strict=True)


def parse_tools(raw: Raw, ignored: IgnoredFields, field: str = "tools") -> ToolSpecs:
    """Parse the tools of a field.

    Raises ApiError 400 with the path of a malformed tool.
    """
    if (size := memoryview(raw).nbytes) > MAX_TOOLS_BYTES:
        raise unsupported(f"{{param}} has {size} bytes of JSON; at most {MAX_TOOLS_BYTES} are allowed", field)
    tools: list[tuple[_Tool, str]] = []
    hosted: list[str] = []
    found: list[Raw] = _LIST_DECODER.decode(raw, field)
    if len(found) > MAX_TOOLS:
        raise unsupported(f"{{param}} takes at most {MAX_TOOLS} tools, not {len(found)}", field)
    for index, data in enumerate(found):
        path = f"{field}[{index}]"
        kind = _TYPE_DECODER.decode(data, path).type
        if kind in _DECODERS:
            tools.append((_DECODERS[kind].read(data, path, ignored), path))
        elif ignored.refuse:
            known = ", ".join(_DECODERS)
            raise unsupported(f"{{param}}: {kind[:40]!r} is not supported; this server accepts {known}", f"{path}.type")
        else:
            hosted.append(kind)
            ignored.add(f"{path}.{kind}")
    return ToolSpecs(tuple(tools), tuple(hosted))


def collect_tools(sources: Sequence[ToolSpecs], ignored: IgnoredFields) -> ResponseTools:
    """Collect the tools of a request and of the items in its conversation.

    Later definitions of a tool replace earlier ones. Raises ApiError 400 if names are not unique.
    """
    writer = _Writer(ignored)
    for specs in sources:
        writer.drop(specs)
        for tool, path in specs.tools:
            writer.add(tool, path)
    hosted = tuple(kind for specs in sources for kind in specs.hosted)
    written = {(known.name, known.namespace): name for name, known in writer.names.items()}
    for name, known in writer.names.items():
        written.setdefault((known.name, None), name)
    tools = checked_tools(writer.functions, "name", strict_by_default=writer.strict_by_default)
    return ResponseTools(tools, writer.names, tuple(writer.described), hosted, written)


def _model_name(name: str, namespace: str | None, taken: Sequence[str] | Mapping[str, Any]) -> str:
    """Return a unique name that a model can write.

    It has letters, digits and the punctuation allowed in tool names, at most MAX_NAME_CHARS in total.
    """
    full = name if namespace is None else f"{namespace.rstrip('_')}__{name}"
    written = _UNUSUAL.sub("_", full)
    if len(written) <= MAX_NAME_CHARS and written not in taken:
        return written
    digest = hashlib.sha256(f"{namespace}\0{name}".encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{written[: MAX_NAME_CHARS - _DIGEST_CHARS - 1]}_{digest}"


def _unanchored(pattern: str) -> str:
    """Strip the anchors around a regex, which matches whole inputs anyway."""
    pattern = pattern.removeprefix("^")
    return pattern[:-1] if pattern.endswith("$") and not pattern.endswith("\\$") else pattern


def _strict(tool: FunctionSpec) -> bool:
    """Return True if the arguments of a tool are constrained to their schema.

    The default is True if the schema is supported.
    """
    if tool.strict is not None or tool.parameters is None:
        return bool(tool.strict)
    return _is_supported(tool.parameters)


def _is_supported(schema: dict[str, Any]) -> bool:
    try:
        check_schema(rewritten := rewrite_schema(schema))
        check_references(rewritten)
    except SchemaError:
        return False
    return True


def _described(tool: _Function | _Custom) -> dict[str, Any]:
    described: dict[str, Any] = msgspec.to_builtins(tool)
    return {**described, "strict": _strict(tool)} if isinstance(tool, _Function) else described
