"""Grammars of tool calls, in the form in which a model writes them."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from tandem.frontend.errors import unsupported
from tandem.frontend.grammar.grammar import ANY_TEXT, Grammar, lark, literal, quoted
from tandem.frontend.grammar.json_schema import (
    LENIENT_OPTIONS,
    OPTIONS,
    SchemaError,
    check_nesting,
    check_schema,
    closed,
    moved,
    refused,
    with_options,
)
from tandem.frontend.request.tools import Tool, ToolUse


class CallSyntax(Struct, frozen=True):
    """How calls are written: `opening`, calls parted by `between`, `closing`; around each call `before` and `after`.

    A call is a JSON object of `name` and `arguments`, whatever the latter is called here. Free text ends where
    `trigger` begins; where that is empty, text is what does not begin with a brace.
    """

    trigger: str = ""
    opening: str = ""
    before: str = ""
    after: str = ""
    between: str = "\n"
    closing: str = ""
    arguments: str = "arguments"


HERMES = CallSyntax(trigger="<tool_call>", before="<tool_call>\n", after="\n</tool_call>")
LLAMA3_JSON = CallSyntax(between="; ", arguments="parameters")
MISTRAL = CallSyntax(trigger="[TOOL_CALLS]", opening="[TOOL_CALLS][", between=", ", closing="]")
GENERIC_JSON = CallSyntax()


def tool_grammar(
    use: ToolUse, syntax: CallSyntax, special: Mapping[str, int], content: Grammar | None = None
) -> Grammar | None:
    """What an output with tools is held to, or None where nothing holds it.

    A call that is required is always held to its form and to the schema of its arguments, as far as that can be; a
    strict tool's arguments to all of it. `special` has the tokenizer's special tokens by their text, `content` what
    holds the text beside the calls. Raises ApiError 400 for a schema that cannot be followed.
    """
    free = use.choice.mode == "auto"
    if not use.active or not use.tools or (free and content is None and not any(tool.strict for tool in use.tools)):
        return content
    if content is not None and content.schema is None:
        raise unsupported(f"{content.param!r} and 'tools' cannot be combined; give one of them", content.param)
    tools = [tool for tool in use.tools if use.choice.name in (None, tool.name)]
    writer = _Writer(syntax, special)
    rules = writer.calls([_call_schema(tool, syntax) for tool in tools], use.parallel and use.choice.name is None)
    if not free:
        start = "start: calls\n"
    elif content is None:
        start = writer.text_or_calls()
    else:
        assert content.schema is not None
        start = f"start: calls | content\ncontent: {_json(with_options(closed(content.schema), OPTIONS))}\n"
    return Grammar(lark(start + rules), "tools", "'tools'")


_BLANKS = r"[ \n\r\t]*"
_NO_CALL = rf"{_BLANKS}([^{{\[ \n\r\t](.|\n)*|\[({_BLANKS}[^{{ \n\r\t](.|\n)*)?)"
"""Text that does not begin like a call, or an array of calls."""


class _Writer:
    """Writes the rules of one syntax."""

    def __init__(self, syntax: CallSyntax, special: Mapping[str, int]) -> None:
        self._syntax = syntax
        self._special = special

    def calls(self, schemas: list[dict[str, Any]], several: bool) -> str:
        """The rules `calls` and, for calls whose trigger was written, `triggered`."""
        syntax = self._syntax
        more = f"({self._literal(syntax.between)} one)*" if several else ""
        before, opening = self._literal(syntax.before), self._literal(syntax.opening)
        first = syntax.opening + syntax.before
        assert first.startswith(syntax.trigger)
        rest = self._literal(first.removeprefix(syntax.trigger))
        after, closing = self._literal(syntax.after), self._literal(syntax.closing)
        return (
            f"calls: {opening} one {more} {closing}\n"
            f"triggered: {rest} call {after} {more} {closing}\n"
            f"one: {before} call {after}\n"
            f"call: {' | '.join(_json(schema) for schema in schemas)}\n"
        )

    def text_or_calls(self) -> str:
        """The rule `start`: text, calls, or calls after a text."""
        trigger = self._syntax.trigger
        if not trigger:
            return f'start: "" | TEXT | calls\nTEXT: /{_NO_CALL}/\n'
        if trigger in self._special:
            # No text makes a special token.
            return f"start: TEXT | TEXT {self._literal(trigger)} triggered\nTEXT: /{ANY_TEXT}/\n"
        return f"start: TEXT | trigger triggered\ntrigger[lazy]: TEXT {quoted(trigger)}\nTEXT: /{ANY_TEXT}/\n"

    def _literal(self, text: str) -> str:
        return literal(text, self._special)


def _call_schema(tool: Tool, syntax: CallSyntax) -> dict[str, Any]:
    """The schema of a call of this tool."""
    try:
        parameters, options = _parameters(tool)
    except SchemaError as error:
        raise refused(error, "tools", f"the parameters of the tool {tool.name!r}") from None
    keys = {
        "name": {"const": tool.name},
        syntax.arguments: moved(closed(parameters), f"#/properties/{syntax.arguments}"),
    }
    return with_options(
        {"type": "object", "properties": keys, "required": list(keys), "additionalProperties": False}, options
    )


def _parameters(tool: Tool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a tool's arguments, which are always an object, and how it is compiled."""
    given = tool.parameters
    if not tool.strict:
        check_nesting(given)
        return {**({} if _has_kind(given) else {"type": "object"}), **(given or {})}, LENIENT_OPTIONS
    if given is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}, OPTIONS
    check_schema(given)
    return {**({} if _has_kind(given) else {"type": "object"}), **given}, OPTIONS


def _has_kind(schema: dict[str, Any] | None) -> bool:
    """Whether a schema says by itself what kind of value it is of."""
    return schema is not None and not {"type", "$ref", "anyOf", "oneOf", "allOf"}.isdisjoint(schema)


def _json(schema: dict[str, Any]) -> str:
    return "%json " + msgspec.json.encode(schema).decode()
