"""Build the grammar of a request from its fields and validate it before the engine compiles it."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs

from tandem.frontend.errors import renamed
from tandem.frontend.grammar.checker import GrammarChecker
from tandem.frontend.grammar.grammar import (
    THINK_TAGS,
    Grammar,
    ThinkingMode,
    ThinkTags,
    output_grammar,
    record_removed,
    schema_body,
)
from tandem.frontend.grammar.json_schema import Path
from tandem.frontend.grammar.relaxed_schema import without_keyword
from tandem.frontend.grammar.schema_search import SearchError
from tandem.frontend.grammar.tool_calls import (
    ANY_OBJECT,
    ArgumentSchema,
    CallSyntax,
    argument_schemas,
    calls_are_constrained,
    tool_grammar,
)
from tandem.frontend.grammar.xml_calls import unenforced
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.options import GenerationOptions
from tandem.frontend.request.tools import ToolUse
from tandem.frontend.workers import Workers
from tandem.protocol.params import MAX_GRAMMAR_CHARS

MAX_REMEMBERED = 256
"""Size of the LRU cache of keywords that do not compile, in schemas."""


class Constraint(Struct, frozen=True):
    """Validated grammar of a request."""

    text: str
    """Grammar in llguidance's format."""
    seconds: float
    """CPU time of the check, in seconds."""


class Draft(Struct, frozen=True):
    """Parts of a grammar that have not been compiled yet."""

    content: Grammar | None
    """Grammar of an output without tool calls."""
    schemas: list[ArgumentSchema]
    """Schemas of the tools that may be called; empty if calls are not constrained."""


class GrammarBuilder:
    """Build the grammars of requests.

    `special_tokens` maps the text of the tokenizer's special tokens, and of tags that are one token, to their id.
    """

    def __init__(self, checker: GrammarChecker, workers: Workers, special_tokens: Mapping[str, int]) -> None:
        self._checker = checker
        self._workers = workers
        self._special_tokens = special_tokens
        self._removed: OrderedDict[str, list[tuple[Path, str]] | None] = OrderedDict()
        """Keywords that do not compile, by grammar text, most recently used last.

        None if the search for them reached its limit."""

    async def build(
        self,
        options: GenerationOptions,
        use: ToolUse | None = None,
        syntax: CallSyntax | None = None,
        thinking: ThinkingMode = ThinkingMode.NONE,
        think_tags: ThinkTags = THINK_TAGS,
        ignored: IgnoredFields | None = None,
        client: str = "",
        vocab_size: int | None = None,
    ) -> Constraint | None:
        """Build the grammar for the engine, or return None for unconstrained output.

        `syntax` is the format in which the model writes the calls of `use`; without it, calls are not constrained.
        Schema keywords that cannot be enforced are recorded in `ignored`. `client` is the name of the API key.
        `vocab_size` is the model's, if the tokenizer may have more tokens.
        Raises ApiError 400 for an invalid grammar, with line and column, and for fields that cannot be combined; 429
        while too many other grammars are being compiled.
        """
        if not self._is_constrained(options, use):
            return None
        ignored = ignored or IgnoredFields()
        special = {
            text: token for text, token in self._special_tokens.items() if vocab_size is None or token < vocab_size
        }
        # A schema may have thousands of subschemas to check.
        draft = await self._workers.run(self._draft, options, use, syntax, ignored)
        grammar = await self._workers.run(self._grammar, draft, use, syntax, special)
        if grammar is None:
            return None
        if not await self._compiles(grammar, client) and (draft.schemas or grammar.schema is not None):
            draft = await self._corrected(draft, options, ignored, client)
            loose = _without_schemas(draft)
            for each, as_schemas in ((draft, False), (draft, True), (loose, True)):
                grammar = await self._workers.run(self._grammar, each, use, syntax, special, as_schemas)
                assert grammar is not None
                if await self._compiles(grammar, client):
                    break
            if each is loose:
                for kept, replaced in zip(draft.schemas, loose.schemas, strict=True):
                    if replaced is not kept:
                        ignored.add(kept.tool.path)
        seconds = await self._checker.check(grammar, client)
        if thinking is ThinkingMode.NONE:
            return Constraint(grammar.text, seconds)
        return Constraint(grammar.after_thinking(thinking is ThinkingMode.OPEN, special, think_tags), seconds)

    async def _compiles(self, grammar: Grammar, client: str) -> bool:
        is_short = len(grammar.text) <= MAX_GRAMMAR_CHARS
        return is_short and (await self._checker.compile(grammar, client)).error is None

    def _is_constrained(self, options: GenerationOptions, use: ToolUse | None) -> bool:
        sources = (options.response_format, options.regex, options.grammar)
        return (
            any(source is not None for source in sources)
            or bool(options.choice)
            or (use is not None and use.active and bool(use.tools))
        )

    def _draft(
        self, options: GenerationOptions, use: ToolUse | None, syntax: CallSyntax | None, ignored: IgnoredFields
    ) -> Draft:
        found = IgnoredFields(ignored.refuse)
        content = output_grammar(options.response_format, options.regex, options.choice, options.grammar, found)
        for path in found.paths:
            ignored.add(renamed(path, options.constraint_names))
        if use is None or syntax is None or not calls_are_constrained(use, content):
            return Draft(content, [])
        schemas = argument_schemas(use, ignored)
        if syntax.is_xml:
            for each in schemas:
                record_removed(unenforced(each.schema), each.tool.path, ignored)
        return Draft(content, schemas)

    def _grammar(
        self,
        draft: Draft,
        use: ToolUse | None,
        syntax: CallSyntax | None,
        special_tokens: Mapping[str, int],
        as_schemas: bool = False,
    ) -> Grammar | None:
        content = draft.content
        if not draft.schemas and content is not None and content.schema is not None and as_schemas:
            return structs.replace(content, body=schema_body(content.schema, as_schema=True))
        if not draft.schemas:
            return content
        assert use is not None and syntax is not None, "calls are constrained without tools"
        return tool_grammar(use, syntax, special_tokens, content, draft.schemas, as_schemas)

    async def _corrected(self, draft: Draft, options: GenerationOptions, ignored: IgnoredFields, client: str) -> Draft:
        """Remove the keywords that do not compile from schemas that are not strict.

        Raises ApiError 400 with the path of the error if a strict schema does not compile.
        """
        content = draft.content
        if content is not None and content.schema is not None:
            alone = structs.replace(content, body=schema_body(content.schema, as_schema=True))
            schema = await self._compilable(alone, renamed(content.param, options.constraint_names), ignored, client)
            if schema is None:
                await self._checker.check(alone, client)
            else:
                content = structs.replace(content, body=schema_body(schema), schema=schema)
        schemas = []
        for each in draft.schemas:
            alone = Grammar(schema_body(each.schema, as_schema=True), "tools", each.name, each.schema, each.is_strict)
            schema = await self._compilable(alone, each.tool.path, ignored, client)
            if schema is None:
                ignored.add(each.tool.path)
                schema = ANY_OBJECT
            schemas.append(structs.replace(each, schema=schema))
        return Draft(content, schemas)

    async def _compilable(
        self, grammar: Grammar, field: str, ignored: IgnoredFields, client: str
    ) -> dict[str, Any] | None:
        """Return the schema of a grammar without the keywords that do not compile, and record them in `ignored`.

        Returns None if the search for them reached its limit. Raises ApiError 400 if a strict schema does not compile.
        """
        schema = grammar.schema
        assert schema is not None, "a grammar without a schema is searched"
        if grammar.is_strict:
            await self._checker.check(grammar, client)
            return schema
        if (await self._checker.compile(grammar, client)).error is None:
            return schema
        removed = await self._search(grammar.text, schema, client)
        if removed is None:
            return None
        for path, key in removed:
            schema, pointers = without_keyword(schema, path, key)
            record_removed(pointers, field, ignored)
        return schema

    async def _search(self, text: str, schema: dict[str, Any], client: str) -> list[tuple[Path, str]] | None:
        """Find the keywords of a schema that do not compile; the result is cached."""
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in self._removed:
            try:
                self._removed[key] = await self._checker.search(client).relax(schema)
            except SearchError:
                self._removed[key] = None
            if len(self._removed) > MAX_REMEMBERED:
                self._removed.popitem(last=False)
        self._removed.move_to_end(key)
        return self._removed[key]


def _without_schemas(draft: Draft) -> Draft:
    """Replace schemas of tools that are not strict with "any object", because all of them may be too large together."""
    schemas = [each if each.is_strict else structs.replace(each, schema=ANY_OBJECT) for each in draft.schemas]
    return structs.replace(draft, schemas=schemas)
