"""Build the grammar that constrains an output from the fields of a request.

Its text is in llguidance's format: JSON that contains a JSON schema or a grammar in llguidance's dialect of Lark.
`GrammarChecker` validates it before the engine compiles it.
"""

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec
from msgspec import Struct

from tandem.frontend.errors import ApiError, malformed, unsupported
from tandem.frontend.grammar.json_rules import json_grammar, quoted
from tandem.frontend.grammar.json_schema import (
    OPTIONS,
    SchemaError,
    check_count,
    check_schema,
    close_objects,
    invalid_schema,
    with_options,
)
from tandem.frontend.grammar.references import check_references
from tandem.frontend.grammar.relaxed_schema import relax_schema, rewrite_schema
from tandem.frontend.request.ignored_fields import IgnoredFields, unknown_field
from tandem.frontend.request.values import wrong_type


class ThinkTags(Struct, frozen=True):
    """Tags around the reasoning of a model."""

    start: str
    end: str

    @property
    def texts(self) -> tuple[str, str]:
        return self.start, self.end


THINK_TAGS = ThinkTags("<think>", "</think>")
MISTRAL_THINK_TAGS = ThinkTags("[THINK]", "[/THINK]")

_REGEX_FLAGS = "(?-s)"
"""Keeps `.` from matching line breaks, as in Python and most dialects; llguidance's default is the opposite."""

ANY_TEXT = r"(.|\n)*"
_BLANK_LINES = r"/\n{0,2}/"
_BODY = "body"


class ThinkingMode(Enum):
    """Whether an output may start with reasoning, which is never constrained."""

    NONE = "none"
    OPTIONAL = "optional"
    """The output may start with the opening tag."""
    OPEN = "open"
    """The prompt ends with the opening tag, so the output starts within the reasoning."""


class Grammar(Struct, frozen=True):
    """A grammar and the request field it came from."""

    body: dict[str, Any]
    """One entry of llguidance's `grammars` list."""
    param: str
    """Name of the request field, for the `param` of errors."""
    name: str
    """Name of the request field in error messages."""
    schema: dict[str, Any] | None = None
    """The client's JSON schema, if the grammar consists of nothing else."""
    is_strict: bool = True
    """False if schema keywords that do not compile are removed instead of refused."""
    regex: str | None = None
    """The client's regular expression, if the grammar consists of nothing else."""

    @property
    def text(self) -> str:
        """Encode the grammar for the engine."""
        return _encode({"grammars": [self.body]})

    def after_thinking(self, opened: bool, token_ids: Mapping[str, int], tags: ThinkTags = THINK_TAGS) -> str:
        """Encode this grammar, preceded by reasoning.

        Reasoning is any text up to its closing tag. With `opened` the prompt ends with the opening tag; otherwise the
        reasoning is optional. `token_ids` has the tags that are a single token.
        """
        closed = f"closed {_BLANK_LINES}"
        reasoning = closed if opened else f"({literal(tags.start, token_ids)} {closed})?"
        if tags.end in token_ids:
            rules = f"closed: TEXT {literal(tags.end, token_ids)}\nTEXT: /{ANY_TEXT}/\n"
        else:
            rules = f"closed[lazy]: TEXT {quoted(tags.end)}\nTEXT: /{ANY_TEXT}/\n"
        start = {"lark_grammar": f"start: {reasoning} @{_BODY}\n{rules}"}
        return _encode({"grammars": [start, {"name": _BODY, **self.body}]})


def output_grammar(
    response_format: Mapping[str, Any] | None,
    regex: str | None,
    choice: Sequence[str],
    grammar: str | None,
    ignored: IgnoredFields | None = None,
) -> Grammar | None:
    """Build the grammar of the request fields; return None if the output is unconstrained.

    Schema keywords that cannot be enforced are recorded in `ignored`, unless the schema is strict.

    Raises ApiError 400 if two of the fields are given, or if a schema is not supported.
    """
    format_grammar = None if response_format is None else _response_format_grammar(response_format, ignored)
    given = {
        "response_format": format_grammar is not None,
        "regex": regex is not None,
        "choice": bool(choice),
        "grammar": grammar is not None,
    }
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise unsupported("{other} and {param} cannot be combined; give one of them", names[1], names[0])
    if regex is not None:
        return Grammar(lark(f"start: /{escape_regex(regex)}/"), "regex", "'regex'", regex=regex)
    if choice:
        return Grammar(lark("start: " + " | ".join(quoted(text) for text in choice)), "choice", "'choice'")
    if grammar is not None:
        return Grammar(lark(grammar), "grammar", "'grammar'")
    return format_grammar


def schema_grammar(
    schema: dict[str, Any], param: str, name: str, strict: bool = True, ignored: IgnoredFields | None = None
) -> Grammar:
    """Build the grammar of a JSON schema.

    Keywords that cannot be enforced are removed and recorded in `ignored`; with `strict` they are errors. Raises
    ApiError 400 if the schema is malformed, too large or, with `strict`, not supported.
    """
    try:
        check_count(schema)
        schema = rewrite_schema(schema)
        if not strict:
            schema, removed = relax_schema(schema)
            record_removed(removed, param, ignored or IgnoredFields())
        check_schema(schema)
        check_references(schema)
    except SchemaError as error:
        raise invalid_schema(error, param, name) from None
    return Grammar(schema_body(schema), param, name, schema=schema, is_strict=strict)


def schema_body(schema: dict[str, Any], as_schema: bool = False) -> dict[str, Any]:
    """Return the grammar body of a JSON schema.

    With `as_schema` the compiler gets only the schema, so that its errors are about schema keywords.
    """
    closed = close_objects(schema)
    return {"json_schema": with_options(closed, OPTIONS)} if as_schema else json_grammar(closed)


def record_removed(pointers: Sequence[str], field: str, ignored: IgnoredFields) -> None:
    """Record the keywords that were removed from the schema of a field.

    Raises ApiError 400 if ignored fields are refused.
    """
    for pointer in pointers:
        ignored.add(field + pointer[1:].replace("/", "."))


def lark(text: str) -> dict[str, Any]:
    """Return the grammar body of Lark text."""
    return {"lark_grammar": text}


def literal(text: str, token_ids: Mapping[str, int]) -> str:
    """Return a text as a Lark literal, with the tokens of `token_ids` by id.

    These are special tokens, which other tokens cannot spell, and tags that only count as a single token.
    """
    names = sorted(token_ids, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
    return " ".join(f"<[{token_ids[part]}]>" if part in token_ids else quoted(part) for part in parts if part)


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()


def escape_regex(regex: str) -> str:
    """Escape a regex for use between slashes in Lark."""
    return _REGEX_FLAGS + "".join(escape_regex_characters(regex))


def escape_regex_characters(regex: str) -> list[str]:
    """Escape each character of a regex for use between slashes in Lark.

    Raises ApiError 400 for a regex that ends in a lone backslash.
    """
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
            400,
            f"'regex' is invalid at character {len(regex) - 1}: it ends in a backslash; escape it or remove it",
            "regex",
            "invalid_grammar",
        )
    return pieces


def regex_position(regex: str, offset: int) -> int:
    """Find the index of the regex character at an offset into the escaped regex."""
    position = len(_REGEX_FLAGS)
    for index, piece in enumerate(escape_regex_characters(regex)):
        if position >= offset:
            return index
        position += len(piece)
    return len(regex)


def _response_format_grammar(response_format: Mapping[str, Any], ignored: IgnoredFields | None) -> Grammar | None:
    kind = response_format.get("type")
    if not isinstance(kind, str):
        raise wrong_type("response_format.type", "a string", kind)
    if kind not in ("text", "json_object", "json_schema"):
        raise unsupported(
            f"'response_format.type' must be 'text', 'json_object' or 'json_schema', not {kind[:100]!r}",
            "response_format",
        )
    _check_keys(response_format, "response_format", ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "text":
        return None
    if kind == "json_object":
        return schema_grammar({"type": "object"}, "response_format", "{param}")
    return _json_schema_grammar(response_format.get("json_schema"), ignored)


def _json_schema_grammar(given: object, ignored: IgnoredFields | None) -> Grammar:
    name = "response_format.json_schema"
    if not isinstance(given, dict):
        raise wrong_type(name, "an object", given)
    _check_keys(given, name, ("name", "description", "schema", "strict"))
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
    return schema_grammar(schema, f"{name}.schema", "{param}", given.get("strict") is True, ignored)


def _check_keys(fields: Mapping[str, Any], parent: str, known: Sequence[str]) -> None:
    """Raise ApiError 400 for a key that is not known and not null."""
    for name, value in fields.items():
        if name not in known and value is not None:
            raise unknown_field(f"{parent}.{name}")
