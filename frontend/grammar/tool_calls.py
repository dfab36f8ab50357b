"""Grammars of tool calls in the model's format."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, structs

from tandem.frontend.errors import unsupported
from tandem.frontend.grammar.grammar import (
    ANY_TEXT,
    Grammar,
    lark,
    literal,
    record_removed,
)
from tandem.frontend.grammar.json_rules import json_rule, quoted, schema_rule
from tandem.frontend.grammar.json_schema import (
    SchemaError,
    check_count,
    check_schema,
    close_objects,
    invalid_schema,
    rebase_references,
)
from tandem.frontend.grammar.references import check_references
from tandem.frontend.grammar.relaxed_schema import relax_schema, rewrite_schema
from tandem.frontend.grammar.xml_calls import STRING_RULES, XmlCallWriter, written_call
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.tools import Tool, ToolUse


class CallSyntax(Struct, frozen=True):
    """Literals around the tool calls of an output.

    Calls start after `opening`, are separated by `between` and end with `closing`; `before` and `after` enclose each
    call. A call is a JSON object with the keys `name` and the value of `arguments`, or, with `arguments_tag`, the name,
    the tag and the JSON object of the arguments, or, with `is_xml`, an XML element (see `xml_calls`). `trigger` ends
    free text; if it is empty, an output is free text unless it starts with a brace, or with `optional_trigger` and a
    brace.
    """

    trigger: str = ""
    optional_trigger: str = ""
    opening: str = ""
    before: str = ""
    after: str = ""
    between: str = "\n"
    closing: str = ""
    arguments: str = "arguments"
    arguments_tag: str = ""
    """Tag between the function name and its arguments; empty if a call is one JSON object."""
    id_tag: str = ""
    """Tag between the name and an optional call id, before `arguments_tag`."""
    is_xml: bool = False

    @property
    def announcement(self) -> str:
        """Return the tag before calls that follow text; "" if there is none."""
        return self.trigger or self.optional_trigger

    @property
    def tags(self) -> tuple[str, ...]:
        """Return the tags of this syntax, which are single tokens in the vocabulary of a model trained on it."""
        named = (self.trigger, self.optional_trigger, self.after.strip(), self.id_tag, self.arguments_tag)
        return tuple(filter(None, named))

    def written(self, name: str, arguments: Any) -> str:
        """Return one call in the model's format, without the literals around it."""
        if self.is_xml:
            return written_call(name, arguments)
        if self.arguments_tag:
            return name + self.arguments_tag + _encoded(arguments)
        return _encoded({"name": name, self.arguments: arguments})


ID_TAG, ARGUMENTS_TAG = "[CALL_ID]", "[ARGS]"
"""Tags in calls of Mistral tokenizers, version 11 or newer."""

HERMES = CallSyntax(trigger="<tool_call>", before="<tool_call>\n", after="\n</tool_call>")
LLAMA3_JSON = CallSyntax(optional_trigger="<|python_tag|>", between="; ", arguments="parameters")
MISTRAL = CallSyntax(trigger="[TOOL_CALLS]", opening="[TOOL_CALLS][", between=", ", closing="]")
# Tokenizers of version 13 and of version 11, which also writes the ids of calls.
MISTRAL_NAMED = CallSyntax(trigger="[TOOL_CALLS]", before="[TOOL_CALLS]", between="", arguments_tag=ARGUMENTS_TAG)
MISTRAL_WITH_IDS = structs.replace(MISTRAL_NAMED, id_tag=ID_TAG)
GENERIC_JSON = CallSyntax()
QWEN3_CODER = structs.replace(HERMES, is_xml=True)

ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""Schema of arbitrary arguments."""


class ArgumentSchema(Struct, frozen=True):
    """Schema of a tool's arguments, with supported keywords only."""

    tool: Tool
    schema: dict[str, Any]

    @property
    def is_strict(self) -> bool:
        """Return True if a keyword that does not compile is an error; otherwise it is removed."""
        return self.tool.strict and not self.tool.strict_by_default

    @property
    def name(self) -> str:
        """Return the name of the schema in error messages."""
        return f"the parameters of the tool {self.tool.name!r}"


def argument_schemas(use: ToolUse, ignored: IgnoredFields) -> list[ArgumentSchema]:
    """Prepare the schemas of the tools that may be called.

    Unless the tool is strict, keywords that cannot be enforced, or a schema that is too large, are recorded in
    `ignored`. Raises ApiError 400 if the schema of a strict tool is not supported.
    """
    tools = [tool for tool in use.tools if use.choice.name in (None, tool.name)]
    return [ArgumentSchema(tool, _arguments(tool, ignored)) for tool in tools]


def calls_are_constrained(use: ToolUse, content: Grammar | None) -> bool:
    """Return True if a grammar enforces the format of calls."""
    free = use.choice.mode == "auto" and content is None and not any(tool.strict for tool in use.tools)
    return use.active and bool(use.tools) and not free


def tool_grammar(
    use: ToolUse,
    syntax: CallSyntax,
    special_tokens: Mapping[str, int],
    content: Grammar | None = None,
    schemas: Sequence[ArgumentSchema] | None = None,
    as_schemas: bool = False,
) -> Grammar | None:
    """Build the grammar of an output that may call tools; return None if it is unconstrained.

    A required call always follows its format and the supported part of its arguments' schema. `special_tokens` maps the
    text of the tokenizer's special tokens, and of tags that are one token, to their id; `content` constrains an output
    without calls; `schemas` are by default those of `argument_schemas`; `as_schemas` is `as_schema` of `schema_body`.
    Raises ApiError 400 if a schema is not supported, or if `content` cannot be combined with tools.
    """
    if not calls_are_constrained(use, content):
        return content
    if schemas is None:
        schemas = argument_schemas(use, IgnoredFields())
    if content is not None and content.schema is None:
        raise unsupported("{param} and 'tools' cannot be combined; give one of them", content.param)
    write = schema_rule if as_schemas else json_rule
    writer = _RuleWriter(syntax, special_tokens)
    rules = writer.calls([writer.call(each, write) for each in schemas], use.parallel and use.choice.name is None)
    if use.choice.mode != "auto":
        start = "start: calls\n"
    elif content is None:
        start = writer.text_or_calls()
    else:
        assert content.schema is not None
        start = f"start: calls | content\ncontent: {write(close_objects(content.schema))}\n"
    return Grammar(lark(start + rules), "tools", "'tools'")


_BLANKS = r"[ \n\r\t]*"
_NO_CALL = rf"{_BLANKS}([^{{\[ \n\r\t](.|\n)*|\[({_BLANKS}[^{{ \n\r\t](.|\n)*)?)"
"""Regex of text that does not start like a call or an array of calls."""


class _RuleWriter:
    """Write the Lark rules of one call syntax."""

    def __init__(self, syntax: CallSyntax, special_tokens: Mapping[str, int]) -> None:
        self._syntax = syntax
        self._special_tokens = special_tokens
        self._xml_rules = [STRING_RULES] if syntax.is_xml else []

    def call(self, arguments: ArgumentSchema, write: Callable[[dict[str, Any]], str]) -> str:
        """Write the alternative of the rule `call` for a tool; `write` writes a schema within a rule."""
        syntax = self._syntax
        if syntax.is_xml:
            writer = XmlCallWriter(arguments.schema, write, f"t{len(self._xml_rules)}")
            alternative = writer.call(arguments.tool.name)
            self._xml_rules += writer.rules
            return alternative
        if not syntax.arguments_tag:
            return write(_call_schema(arguments, syntax))
        call_id = f"({self._literal(syntax.id_tag)} CALL_ID)? " if syntax.id_tag else ""
        schema = write(close_objects(arguments.schema))
        return f"{quoted(arguments.tool.name)} {call_id}{self._literal(syntax.arguments_tag)} {schema}"

    def calls(self, alternatives: list[str], several: bool) -> str:
        """Write the rule `calls`, and the rule `triggered` for calls after the trigger."""
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
            f"call: {' | '.join(alternatives)}\n"
            + ("CALL_ID: /[a-zA-Z0-9]{9}/\n" if syntax.id_tag else "")
            + "".join(self._xml_rules)
        )

    def text_or_calls(self) -> str:
        """Write the rule `start`: text, calls, or text followed by calls."""
        trigger = self._syntax.trigger
        if not trigger:
            return f'start: "" | TEXT | calls\nTEXT: /{_NO_CALL}/\n'
        if trigger in self._special_tokens:
            # Ordinary text never contains the token.
            return f"start: TEXT | TEXT {self._literal(trigger)} triggered\nTEXT: /{ANY_TEXT}/\n"
        return f"start: TEXT | trigger triggered\ntrigger[lazy]: TEXT {quoted(trigger)}\nTEXT: /{ANY_TEXT}/\n"

    def _literal(self, text: str) -> str:
        return literal(text, self._special_tokens)


def _call_schema(arguments: ArgumentSchema, syntax: CallSyntax) -> dict[str, Any]:
    """Return the JSON schema of a call of this tool."""
    keys = {
        "name": {"const": arguments.tool.name},
        syntax.arguments: rebase_references(close_objects(arguments.schema), f"#/properties/{syntax.arguments}"),
    }
    return {"type": "object", "properties": keys, "required": list(keys), "additionalProperties": False}


def _arguments(tool: Tool, ignored: IgnoredFields) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are always an object."""
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False} if tool.strict else ANY_OBJECT
    removed: list[str] = []
    try:
        check_count(tool.parameters)
        given = rewrite_schema(tool.parameters)
        if not tool.strict:
            given, removed = relax_schema(given)
        check_schema(given)
        check_references(given)
    except SchemaError as error:
        if tool.strict:
            raise invalid_schema(error, "tools", f"the parameters of the tool {tool.name!r}") from None
        given, removed = ANY_OBJECT, ["#"]
    record_removed(removed, tool.path, ignored)
    return given if _states_type(given) else {"type": "object", **given}


def _states_type(schema: dict[str, Any]) -> bool:
    """Return True if a schema specifies the type of its values, directly or via combined schemas."""
    return not {"type", "$ref", "anyOf", "oneOf", "allOf"}.isdisjoint(schema)


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()
