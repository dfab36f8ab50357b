"""Convert JSON schemas to grammars with a limited number of digits.

The compiler's grammar of a number has no limit on digits, so a small model may write digits forever. If a schema
allows such numbers, the objects, arrays and alternatives that contain them are written as Lark rules, equal to the
compiler's except for the limited numbers. Parts without such numbers are left to the compiler.
"""

import json
from typing import Any

import msgspec

from tandem.frontend.grammar.json_schema import ANNOTATIONS, NUMBERS, OPTIONS, map_schemas, walk_schemas, with_options
from tandem.frontend.grammar.references import target_of

MAX_DIGITS, MAX_FRACTION, MAX_EXPONENT = 40, 20, 3
"""Maximum digits of a number before and after the decimal point, and in its exponent."""
MAX_LIMIT = 10**18
"""Largest supported `minimum` or `maximum`: the compiler uses 64-bit integers."""
LIMITED_FRACTION = 10
"""Maximum digits after the decimal point of a number with limits, as in the compiler."""
MAX_REPEATED = 1000
"""Largest `minItems` or `maxItems` of an array that is written as a rule."""

_DIGITS = f"(0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})"
_REST = rf"(\.[0-9]{{1,{MAX_FRACTION}}})?([eE][+-]?[0-9]{{1,{MAX_EXPONENT}}})?"
_HEAD = f"""\
%llguidance {{"ignore_once": true}}
%ignore /{OPTIONS["whitespace_pattern"]}/
any: LITERAL | NUMBER | STRING | list | record
list: "[" (any ("," any)*)? "]"
record: "{{" (STRING ":" any ("," STRING ":" any)*)? "}}"
LITERAL: "null" | "true" | "false"
NUMBER: /-?{_DIGITS}{_REST}/
POSITIVE: /{_DIGITS}{_REST}/
INTEGER: /-?{_DIGITS}/
LONG: /[1-9][0-9]{{18,{MAX_DIGITS - 1}}}/
STRING: /"([^"\\\\\\x00-\\x1F\\x7F]|\\\\["\\\\bfnrt]|\\\\u(00[01][0-9a-fA-F]|007[fF]))*"/
"""
_COMBINING = {"$ref", "allOf", "anyOf", "oneOf", "const", "enum"}
_SKIPPED = ANNOTATIONS | {"$defs", "definitions"}
_OBJECT = {"type", "properties", "required", "additionalProperties"}
_ARRAY = {"type", "items", "prefixItems", "minItems", "maxItems"}
_KEYWORDS_OF = {
    "integer": {*NUMBERS},
    "number": {*NUMBERS},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "object": {"properties", "patternProperties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
}
"""Keywords that apply to values of each type."""
_ALL_KEYWORDS = set().union(*_KEYWORDS_OF.values())


class _UnsupportedError(Exception):
    """The schema is left to the compiler."""


def json_grammar(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the grammar body of a schema."""
    rules = _rules(schema)
    if rules is None:
        return {"json_schema": with_options(map_schemas(schema, _with_limits), OPTIONS)}
    return {"lark_grammar": rules}


def json_rule(schema: dict[str, Any]) -> str:
    """Write a schema for use within a Lark rule."""
    rules = _rules(schema)
    return schema_rule(map_schemas(schema, _with_limits)) if rules is None else f"%lark {{\n{rules}}}"


def quoted(text: str) -> str:
    """Return a Lark string literal, with non-ASCII characters escaped.

    Lark's lexer rejects some of them.
    """
    return json.dumps(text).replace("\x7f", "\\u007f")


def schema_rule(schema: dict[str, Any]) -> str:
    """Write a schema for use within a Lark rule, leaving all of it to the compiler."""
    return "%json " + msgspec.json.encode(with_options(schema, OPTIONS)).decode()


def _rules(schema: dict[str, Any]) -> str | None:
    """Write the rules of a schema; return None if the compiler's suffice or the schema is unsupported."""
    writer = _Writer(schema)
    try:
        rules = writer.write()
    except _UnsupportedError:
        return None
    return _HEAD + rules if writer.limits_numbers else None


def _with_limits(node: dict[str, Any]) -> dict[str, Any]:
    """Add limits to the numbers of a schema, so that the compiler bounds their digits."""
    kinds = node.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if {"integer", "number"}.isdisjoint(kinds) or not _COMBINING.isdisjoint(node):
        return node
    limits = {key: node[key] for key in NUMBERS if key in node}
    return {**node, **_missing_limits("number" if "number" in kinds else "integer", limits)}


def _missing_limits(kind: str, limits: dict[str, Any]) -> dict[str, float]:
    """Return the missing limits of a number, so that the compiler bounds its digits."""
    if any(isinstance(limit, bool) or abs(limit) >= MAX_LIMIT for limit in limits.values()):
        return {}
    others: dict[str, float] = {} if {"minimum", "exclusiveMinimum"} & limits.keys() else {"minimum": -MAX_LIMIT}
    if not {"maximum", "exclusiveMaximum"} & limits.keys():
        others["exclusiveMaximum"] = MAX_LIMIT
    is_short = all(round(limit, LIMITED_FRACTION) == limit for limit in limits.values())
    if kind == "number" and "multipleOf" not in limits and is_short:
        others["multipleOf"] = 10.0**-LIMITED_FRACTION
    return others


class _Writer:
    """Write the rules of one schema."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.limits_numbers = False
        """True once a number was limited that the compiler would not limit."""
        self._root = root
        self._lines: list[str] = []
        self._names: dict[int, str] = {}
        """Rule names of referenced schemas, by `id` of the schema."""
        self._pending: list[tuple[str, dict[str, Any]]] = []

    def write(self) -> str:
        start = self._value(self._root)
        while self._pending:
            name, node = self._pending.pop()
            self._lines.append(f"{name}: {self._value(node)}\n")
        return f"start: {start}\n{''.join(self._lines)}"

    def _rule(self, text: str) -> str:
        name = f"r{len(self._lines)}_{len(self._names)}"
        self._lines.append(f"{name}: {text}\n")
        return name

    def _limited(self, text: str) -> str:
        self.limits_numbers = True
        return text

    def _value(self, node: object) -> str:
        if not isinstance(node, dict):
            if node is not True:
                raise _UnsupportedError
            return self._limited("any")
        keys = {key for key in node if key not in _SKIPPED and not key.startswith("x-")}
        if not keys:
            return self._limited("any")
        kind = node.get("type")
        if combining := keys & _COMBINING:
            if keys == {"$ref"}:
                return self._reference(node)
            if keys == {"anyOf"} and node["anyOf"]:
                return f"({' | '.join(self._value(option) for option in node['anyOf'])})"
            if keys == {"allOf"} and len(node["allOf"]) == 1:
                return self._value(node["allOf"][0])
            if combining <= {"const", "enum"}:
                return self._schema(node)
        elif isinstance(kind, list):
            rest = {key: value for key, value in node.items() if key not in _ALL_KEYWORDS}
            options = [
                {**rest, **{key: node[key] for key in _KEYWORDS_OF.get(each, ()) if key in node}, "type": each}
                for each in dict.fromkeys(kind)
            ]
            return f"({' | '.join(map(self._value, options))})"
        elif kind in ("integer", "number"):
            return self._number(node, kind)
        elif kind == "object" and keys <= _OBJECT:
            return self._object(node)
        elif kind == "array" and keys <= _ARRAY:
            return self._array(node)
        return self._schema(node)

    def _schema(self, node: dict[str, Any]) -> str:
        """Leave a schema without references to the compiler."""
        if any(isinstance(part, dict) and "$ref" in part for _, part in walk_schemas(node)):
            raise _UnsupportedError
        kept = {key: value for key, value in node.items() if key not in _SKIPPED}
        limited = map_schemas(kept, _with_limits)
        self.limits_numbers |= limited != kept
        return schema_rule(limited)

    def _reference(self, node: dict[str, Any]) -> str:
        found = target_of(node, self._root)
        if found is None:
            raise _UnsupportedError
        _, target = found
        if id(target) not in self._names:
            name = self._names[id(target)] = f"s{len(self._names)}"
            self._pending.append((name, target))
        return self._names[id(target)]

    def _number(self, node: dict[str, Any], kind: str) -> str:
        limits = {key: node[key] for key in NUMBERS if key in node}
        if not limits:
            return self._limited("INTEGER" if kind == "integer" else "NUMBER")
        if kind == "number" and limits == {"minimum": 0}:
            return self._limited("POSITIVE")
        others = _missing_limits(kind, limits)
        if not others:
            return self._schema(node)
        few = schema_rule({"type": kind, **limits, **others})
        is_upward = "multipleOf" not in limits and "exclusiveMaximum" in others and "minimum" not in others
        return self._limited(f"({few} | LONG)" if kind == "integer" and is_upward else few)

    def _object(self, node: dict[str, Any]) -> str:
        named, required = node.get("properties", {}), dict.fromkeys(node.get("required", []))
        other = node.get("additionalProperties", True)
        members: list[tuple[str, bool]] = []
        for name in dict.fromkeys([*named, *required]):
            child = named.get(name, other)
            if child is not False:
                text = f'{_name(name)} ":" {self._value(child)}'
                members.append((self._rule(text), name in required))
            elif name in required:
                raise _UnsupportedError
        if not members and other is True:
            return self._limited("record")
        return self._rule(f'"{{" {self._members(members, self._others(other, [*named, *required]))} "}}"')

    def _others(self, other: object, taken: list[str]) -> str:
        """Write a member with a name other than `taken`; return "" if such members are forbidden."""
        if other is False:
            return ""
        name = "STRING"
        if taken:
            name = f"N{len(self._lines)}"
            self._lines.append(f"{name}: STRING & ~({' | '.join(map(_name, dict.fromkeys(taken)))})\n")
        return self._rule(f'{name} ":" {self._value(other)}')

    def _members(self, members: list[tuple[str, bool]], other: str) -> str:
        """Write the members of an object in order, required or optional, then any number of others."""
        following = self._rule(f'("," {other})*') if other else '""'
        opening = f'({other} ("," {other})*)?' if other else '""'
        for rule, is_required in reversed(members):
            first = f"{rule} {following}"
            opening = first if is_required else self._rule(f"{first} | {opening}")
            following = self._rule(f'"," {first}' if is_required else f'("," {rule})? {following}')
        return opening

    def _array(self, node: dict[str, Any]) -> str:
        first, min_items, max_items = node.get("prefixItems", []), node.get("minItems", 0), node.get("maxItems")
        other = node.get("items", True)
        if min_items > MAX_REPEATED or (max_items or 0) > MAX_REPEATED:
            raise _UnsupportedError
        if other is False:
            max_items = min(len(first), len(first) if max_items is None else max_items)
        if max_items is not None and min_items > max_items:
            raise _UnsupportedError
        texts = [self._value(child) for child in first[:max_items]]
        more = None if max_items is None else max_items - len(texts)
        following = '""'
        if more != 0:
            item = self._rule(self._value(other))
            min_rest = max(min_items - len(texts), 0)
            if not texts:
                rest = f"{item} {_repeated(item, max(min_rest - 1, 0), None if more is None else more - 1)}"
                return f'"[" {rest if min_items else f"({rest})?"} "]"'
            following = _repeated(item, min_rest, more)
        for index in range(len(texts) - 1, -1, -1):
            text = f"{quoted(',') if index else ''} {texts[index]} {following}"
            following = self._rule(text if index < min_items else f"({text})?")
        return f'"[" {following} "]"'


def _repeated(item: str, min_items: int, max_items: int | None) -> str:
    """Write a repetition of further items."""
    return "" if max_items == 0 else f'("," {item}){{{min_items},{"" if max_items is None else max_items}}}'


def _name(name: str) -> str:
    """Return the name of a property as a JSON string."""
    return quoted(json.dumps(name, ensure_ascii=False))
