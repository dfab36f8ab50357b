"""Grammars of tool calls, in the format in which a model writes them."""

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
    check_schema,
    close_objects,
    invalid_schema,
    rebase_references,
    with_options,
)
from tandem.frontend.grammar.relaxed_schema import rewrite_schema
from tandem.frontend.request.tools import Tool, ToolUse


class CallSyntax(Struct, frozen=True):
    """The literals around the tool calls of an output.

    Calls start after `opening`, are separated by `between` and end with `closing`; `before` and `after` enclose each
    call. A call is a JSON object with the keys `name` and the value of `arguments`. `trigger` ends free text; if it
    is empty, an output is free text unless it starts with a brace.
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
    use: ToolUse, syntax: CallSyntax, special_tokens: Mapping[str, int], content: Grammar | None = None
) -> Grammar | None:
    """Build the grammar of an output that may call tools; None without constraints.

    A required call always follows its format and the supported part of its arguments' schema; the arguments of a
    strict tool follow the whole schema. `special_tokens` maps the text of the tokenizer's special tokens to their id;
    `content` constrains an output without calls. Raises ApiError 400 for a schema that is not supported, and for a
    `content` that cannot be combined with tools.
    """
    free = use.choice.mode == "auto"
    if not use.active or not use.tools or (free and content is None and not any(tool.strict for tool in use.tools)):
        return content
    if content is not None and content.schema is None:
        raise unsupported("{param} and 'tools' cannot be combined; give one of them", content.param)
    tools = [tool for tool in use.tools if use.choice.name in (None, tool.name)]
    writer = _RuleWriter(syntax, special_tokens)
    rules = writer.calls([_call_schema(tool, syntax) for tool in tools], use.parallel and use.choice.name is None)
    if not free:
        start = "start: calls\n"
    elif content is None:
        start = writer.text_or_calls()
    else:
        assert content.schema is not None
        start = f"start: calls | content\ncontent: {_json(with_options(close_objects(content.schema), OPTIONS))}\n"
    return Grammar(lark(start + rules), "tools", "'tools'")


_BLANKS = r"[ \n\r\t]*"
_NO_CALL = rf"{_BLANKS}([^{{\[ \n\r\t](.|\n)*|\[({_BLANKS}[^{{ \n\r\t](.|\n)*)?)"
"""Regex of text that does not start like a call or an array of calls."""


class _RuleWriter:
    """Write the Lark rules of one call syntax."""

    def __init__(self, syntax: CallSyntax, special_tokens: Mapping[str, int]) -> None:
        self._syntax = syntax
        self._special_tokens = special_tokens

    def calls(self, schemas: list[dict[str, Any]], several: bool) -> str:
        """Write the rule `calls`, and the rule `triggered` for calls after their trigger."""
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
        """Write the rule `start`: text, calls, or text followed by calls."""
        trigger = self._syntax.trigger
        if not trigger:
            return f'start: "" | TEXT | calls\nTEXT: /{_NO_CALL}/\n'
        if trigger in self._special_tokens:
            # Ordinary text never contains a special token.
            return f"start: TEXT | TEXT {self._literal(trigger)} triggered\nTEXT: /{ANY_TEXT}/\n"
        return f"start: TEXT | trigger triggered\ntrigger[lazy]: TEXT {quoted(trigger)}\nTEXT: /{ANY_TEXT}/\n"

    def _literal(self, text: str) -> str:
        return literal(text, self._special_tokens)


def _call_schema(tool: Tool, syntax: CallSyntax) -> dict[str, Any]:
    """Make the JSON schema of a call of this tool.

    Raises ApiError 400 for parameters that are not supported.
    """
    try:
        parameters, options = _parameters(tool)
    except SchemaError as error:
        raise invalid_schema(error, "tools", f"the parameters of the tool {tool.name!r}") from None
    keys = {
        "name": {"const": tool.name},
        syntax.arguments: rebase_references(close_objects(parameters), f"#/properties/{syntax.arguments}"),
    }
    return with_options(
        {"type": "object", "properties": keys, "required": list(keys), "additionalProperties": False}, options
    )


def _parameters(tool: Tool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schema of a tool's arguments, and the compiler's options for it.

    The arguments are always an object.
    """
    given = None if tool.parameters is None else rewrite_schema(tool.parameters)
    if not tool.strict:
        return {**({} if _states_type(given) else {"type": "object"}), **(given or {})}, LENIENT_OPTIONS
    if given is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}, OPTIONS
    check_schema(given)
    return {**({} if _states_type(given) else {"type": "object"}), **given}, OPTIONS


def _states_type(schema: dict[str, Any] | None) -> bool:
    """Tell whether a schema states its value's type, directly or by combination."""
    return schema is not None and not {"type", "$ref", "anyOf", "oneOf", "allOf"}.isdisjoint(schema)


def _json(schema: dict[str, Any]) -> str:
    return "%json " + msgspec.json.encode(schema).decode()
