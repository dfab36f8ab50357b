"""What an output is held to, from a request's fields to the grammar that the engine compiles.

The text is what llguidance takes: JSON that holds a JSON schema or a grammar in its dialect of Lark. It is checked by
`grammar_check.py` before the engine gets it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from tandem.frontend.errors import ApiError, malformed, unsupported
from tandem.frontend.grammar.json_schema import OPTIONS, SchemaError, check_schema, closed, refused, with_options
from tandem.frontend.grammar.tags import CLOSE, OPEN
from tandem.frontend.request.fields import not_supported, wrong_type

_REGEX_FLAGS = "(?-s)"
"""A dot matches no line break, as in Python and most other dialects; in llguidance's it does by default."""


ANY_TEXT = r"(.|\n)*"
_BLANK_LINES = r"/\n{0,2}/"
_BODY = "body"


class Grammar(Struct, frozen=True):
    """A grammar, and where in the request it came from."""

    body: dict[str, Any]
    """In llguidance's form, without what else it may be a part of."""
    param: str
    name: str
    """What errors call its source."""
    schema: dict[str, Any] | None = None
    """The JSON schema in it, if that is all there is."""
    regex: str | None = None

    @property
    def text(self) -> str:
        return _encoded({"grammars": [self.body]})

    def after_thoughts(self, opened: bool, special: Mapping[str, int]) -> str:
        """The text of this grammar behind thoughts, which hold anything but their end.

        `opened` says that the prompt has begun them; otherwise there need be none.
        """
        closed = f"closed {_BLANK_LINES}"
        thoughts = closed if opened else f"({literal(OPEN, special)} {closed})?"
        if CLOSE in special:
            rules = f"closed: TEXT {literal(CLOSE, special)}\nTEXT: /{ANY_TEXT}/\n"
        else:
            rules = f"closed[lazy]: TEXT {quoted(CLOSE)}\nTEXT: /{ANY_TEXT}/\n"
        start = {"lark_grammar": f"start: {thoughts} @{_BODY}\n{rules}"}
        return _encoded({"grammars": [start, {"name": _BODY, **self.body}]})


def output_grammar(
    response_format: Mapping[str, Any] | None, regex: str | None, choice: Sequence[str], grammar: str | None
) -> Grammar | None:
    """The grammar that these fields of a request ask for, or None for free text.

    Raises ApiError 422 where two of them are given, 400 for a schema that cannot be followed.
    """
    format_grammar = None if response_format is None else _of_response_format(response_format)
    given = {
        "response_format": format_grammar is not None,
        "regex": regex is not None,
        "choice": bool(choice),
        "grammar": grammar is not None,
    }
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise unsupported(f"{names[0]!r} and {names[1]!r} cannot be combined; give one of them", names[1])
    if regex is not None:
        return Grammar(lark(f"start: /{_escaped(regex)}/"), "regex", "'regex'", regex=regex)
    if choice:
        return Grammar(lark("start: " + " | ".join(quoted(text) for text in choice)), "choice", "'choice'")
    if grammar is not None:
        return Grammar(lark(grammar), "grammar", "'grammar'")
    return format_grammar


def schema_grammar(schema: dict[str, Any], param: str, name: str) -> Grammar:
    """Raises ApiError 400 for a schema that cannot be followed."""
    try:
        check_schema(schema)
    except SchemaError as error:
        raise refused(error, param, name) from None
    return Grammar({"json_schema": with_options(closed(schema), OPTIONS)}, param, name, schema=schema)


def lark(text: str) -> dict[str, Any]:
    """The body of a grammar in Lark."""
    return {"lark_grammar": text}


def literal(text: str, special: Mapping[str, int]) -> str:
    """A text in Lark, with the special tokens in it as what they are: no text makes one."""
    names = sorted(special, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else quoted(part) for part in parts if part)


def quoted(text: str) -> str:
    """A literal in Lark. Escapes everything but ASCII: its lexer takes not every character as it is."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _encoded(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _escaped(regex: str) -> str:
    """A regex as it stands between slashes in Lark."""
    escaped = regex_pieces(regex)
    return _REGEX_FLAGS + "".join(escaped)


def regex_pieces(regex: str) -> list[str]:
    """What each character of a regex becomes between slashes."""
    pieces: list[str] = []
    after_backslash = False
    for character in regex:
        if character == "/" and not after_backslash:
            pieces.append("\\/")
        elif character == "\n":
            pieces.append("n" if after_backslash else "\\n")
        else:
            pieces.append(character)
        after_backslash = character == "\\" and not after_backslash
    if after_backslash:
        raise ApiError(
            400, f"'regex' is invalid at character {len(regex) - 1}: it ends in a backslash", "regex", "invalid_grammar"
        )
    return pieces


def place_in_regex(regex: str, offset: int) -> int:
    """The character of a regex that an offset into its form between slashes belongs to."""
    position = len(_REGEX_FLAGS)
    for index, piece in enumerate(regex_pieces(regex)):
        if position >= offset:
            return index
        position += len(piece)
    return len(regex)


def _of_response_format(response_format: Mapping[str, Any]) -> Grammar | None:
    kind = response_format.get("type")
    if not isinstance(kind, str):
        raise wrong_type("response_format.type", "a string", kind)
    if kind not in ("text", "json_object", "json_schema"):
        raise unsupported(
            f"'response_format.type' must be 'text', 'json_object' or 'json_schema', not {kind[:100]!r}",
            "response_format",
        )
    _only(response_format, "response_format", ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "text":
        return None
    if kind == "json_object":
        return schema_grammar({"type": "object"}, "response_format", "'response_format'")
    return _of_json_schema(response_format.get("json_schema"))


def _of_json_schema(given: object) -> Grammar:
    name = "response_format.json_schema"
    if not isinstance(given, dict):
        raise wrong_type(name, "an object", given)
    _only(given, name, ("name", "description", "schema", "strict"))
    for key, kind, expected in (
        ("name", str, "a string"),
        ("description", str, "a string"),
        ("strict", bool, "a boolean"),
    ):
        value = given.get(key)
        if value is not None and not isinstance(value, kind):
            raise wrong_type(f"{name}.{key}", expected, value)
    if not given.get("name"):
        raise malformed(f"the field '{name}.name' is required", f"{name}.name")
    if not isinstance(schema := given.get("schema"), dict):
        raise wrong_type(f"{name}.schema", "an object", schema)
    return schema_grammar(schema, f"{name}.schema", f"'{name}.schema'")


def _only(fields: Mapping[str, Any], parent: str, known: Sequence[str]) -> None:
    for name, value in fields.items():
        if name not in known and value is not None:
            raise not_supported(f"{parent}.{name}")
