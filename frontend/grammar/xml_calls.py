"""Write tool calls as XML, and the grammar rules of such calls.

A call is `<function=NAME>`, an element for each argument and `</function>`. In the element of an argument the value has
its own lines: strings as they are, other values as JSON.

    <parameter=NAME>
    VALUE
    </parameter>
"""

from collections.abc import Callable
from typing import Any

import msgspec

from tandem.frontend.grammar.grammar import ANY_TEXT, escape_regex
from tandem.frontend.grammar.json_rules import quoted
from tandem.frontend.grammar.json_schema import close_objects, join_pointer, rebase_references, walk_schemas
from tandem.frontend.grammar.parameter_types import schema_types
from tandem.frontend.grammar.references import target_of

_VALUE_END = "\n</parameter>\n"
_TAGS = r"(<\/parameter>[ \t\r\n]*<(parameter=|\/function>|\/tool_call>)|<\/function>[ \t\r\n]*<\/tool_call>)"
_TEXT = rf"/{ANY_TEXT}/ & ~/{ANY_TEXT}{_TAGS}{ANY_TEXT}/"
"""Text without anything that the parser of calls takes for the end of a value."""
STRING_RULES = f"xml_string[lazy]: XML_STRING {quoted(_VALUE_END)}\nXML_STRING: {_TEXT}\n"
"""The rules of a string up to the end of its element, which the rules of all tools refer to."""
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")
_CONSTRAINTS = ("pattern", "minLength", "maxLength")
_MEANINGFUL = {"$ref", "allOf", "anyOf", "oneOf", "type", "const", "enum", "properties", *_CONSTRAINTS}
_ARGUMENTS = "arguments"
"""Name in `$defs` of the schema of all arguments, in that of one argument with references to it."""
_MAX_OPTIONS = 100
"""Alternatives of a parameter's schema; with more, it is any text."""


def written_call(name: str, arguments: Any) -> str:
    """Write a call; arguments that are not an object become one parameter."""
    given = arguments if isinstance(arguments, dict) else {_ARGUMENTS: arguments}
    elements = [f"<parameter={parameter}>\n{_written(value)}{_VALUE_END}" for parameter, value in given.items()]
    return f"<function={name}>\n{''.join(elements)}</function>"


def unenforced(schema: dict[str, Any]) -> list[str]:
    """Return the JSON pointers of the keywords in a schema of arguments that the rules leave out.

    These are combinations of several schemas for all arguments, formats of strings, and constraints of strings next to
    other types.
    """
    arguments = _resolved(schema)
    if combined := [key for key in _COMBINING if key in arguments]:
        return [f"#/{key}" for key in combined]
    found = []
    for name, node in arguments.get("properties", {}).items():
        options = _options(node, schema)
        for option in options:
            if isinstance(option, dict) and _is_text(option, schema):
                keys = ("format", *_CONSTRAINTS) if len(options) > 1 else ("format",)
                found += [join_pointer("#", "properties", name, key) for key in keys if key in option]
    return found


class XmlCallWriter:
    """Write the rules of the calls of one tool.

    `schema` is that of the arguments, `write` writes a JSON schema within a rule, and `prefix` begins the names of
    `rules`.
    """

    def __init__(self, schema: dict[str, Any], write: Callable[[dict[str, Any]], str], prefix: str) -> None:
        self.rules: list[str] = []
        self._schema = close_objects(schema)
        self._write = write
        self._prefix = prefix

    def call(self, name: str) -> str:
        """Write the calls of a tool with this name.

        Arguments follow the order of the schema's properties; those of a schema that combines several are any text.
        """
        arguments = _resolved(self._schema)
        if any(key in arguments for key in _COMBINING):
            arguments = {}
        named, other = arguments.get("properties", {}), arguments.get("additionalProperties", True)
        required = arguments.get("required", [])
        parameters = list(dict.fromkeys([*named, *required]))
        elements = []
        for parameter in parameters:
            node = named.get(parameter, other)
            if node is not False:
                element = self._rule(f"{_opening(parameter)} {self._value(node)}")
                elements.append(element if parameter in required else f"{element}?")
        if other is not False:
            taken = f" & ~({' | '.join(map(_opening, parameters))})" if parameters else ""
            opening = self._terminal(r"/<parameter=[^<>\n]+>\n/" + taken)
            elements.append(f"{self._rule(f'{opening} {self._value(other)}')}*")
        header = quoted(f"<function={name}>\n")
        return f'{header} {" ".join(elements)} "</function>"'

    def _rule(self, text: str, attribute: str = "") -> str:
        name = f"{self._prefix}_{len(self.rules)}"
        self.rules.append(f"{name}{attribute}: {text}\n")
        return name

    def _terminal(self, text: str) -> str:
        name = f"{self._prefix}_{len(self.rules)}".upper()
        self.rules.append(f"{name}: {text}\n")
        return name

    def _value(self, node: object) -> str:
        """Write the value of a parameter with this schema, up to the end of its element."""
        options = _options(node, self._schema)
        if any(_is_text(option, self._schema) for option in options):
            return self._string(options[0] if len(options) == 1 else True)
        written: list[str] = []
        for option in options:
            assert isinstance(option, dict), "any other schema admits text"
            if "const" in option or "enum" in option:
                values = [option["const"]] if "const" in option else option["enum"]
                written += [quoted(_written(value)) for value in values]
            else:
                written.append(self._write(_standalone(option, self._schema)))
        return f"({' | '.join(written)}) {quoted(_VALUE_END)}"

    def _string(self, node: object) -> str:
        """Write any text, or a string that follows the constraints of a schema."""
        regexes = []
        if isinstance(node, dict) and schema_types(node, self._schema) == frozenset(("string",)):
            if "pattern" in node:
                regexes.append(_pattern(node["pattern"]))
            if "minLength" in node or "maxLength" in node:
                regexes.append(rf"/(.|\n){{{node.get('minLength', 0)},{node.get('maxLength', '')}}}/")
        if not regexes:
            return "xml_string"
        return self._rule(f"{self._terminal(' & '.join([_TEXT, *regexes]))} {quoted(_VALUE_END)}", "[lazy]")


def _written(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _opening(parameter: str) -> str:
    return quoted(f"<parameter={parameter}>\n")


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """Follow the reference that a schema of arguments consists of, if any."""
    target = target_of(schema, schema)
    return schema if target is None or "properties" in schema else target[1]


def _options(node: object, root: dict[str, Any]) -> list[object]:
    """Return the alternatives that a schema consists of, or only the schema itself."""
    found: list[object] = []
    waiting = [node]
    for _ in range(_MAX_OPTIONS):
        if not waiting:
            return found
        option = waiting.pop()
        parts = _alternatives(option, root)
        waiting += reversed(parts)
        found += [] if parts else [option]
    return [True]


def _alternatives(node: object, root: dict[str, Any]) -> list[object]:
    """Return the schemas in a schema that is nothing but a reference, or nothing but alternatives; else none."""
    keys = _MEANINGFUL & node.keys() if isinstance(node, dict) else set()
    if not isinstance(node, dict) or len(keys) != 1:
        return []
    if (target := target_of(node, root)) is not None:
        return [target[1]]
    return list(node.get("anyOf") or node.get("oneOf") or ())


def _is_text(node: object, root: dict[str, Any]) -> bool:
    """Return True if a schema admits strings that it does not list."""
    if not isinstance(node, dict):
        return True
    types = schema_types(node, root)
    return "const" not in node and "enum" not in node and (types is None or "string" in types)


def _pattern(pattern: str) -> str:
    """Write the regex of the texts in which a pattern of a JSON schema is found."""
    is_start, is_end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    body = pattern[is_start : len(pattern) - is_end]
    return f"/{'' if is_start else ANY_TEXT}(?:{escape_regex(body)}){'' if is_end else ANY_TEXT}/"


def _standalone(node: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a schema as one of its own, to which its references point."""
    if not any(isinstance(part, dict) and "$ref" in part for _, part in walk_schemas(node)):
        return node
    base = f"#/$defs/{_ARGUMENTS}"
    return {**rebase_references(node, base), "$defs": {_ARGUMENTS: rebase_references(root, base)}}
