"""Find the parts of a JSON schema that do not compile, by compiling them separately."""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import quote

from tandem.frontend.grammar.grammar import Grammar, schema_body
from tandem.frontend.grammar.json_schema import Path, rebase_references, subschemas
from tandem.frontend.grammar.process import Checked
from tandem.frontend.grammar.references import target_of
from tandem.frontend.grammar.relaxed_schema import without_keyword

MAX_CHECKS, MAX_CPU_SECONDS = 2000, 1.0
"""Maximum number of compilations of a search, and their total CPU time in seconds."""
MAX_SEARCHED_CHARS = 16 * 1024 * 1024
"""Maximum number of characters compiled in a search; each compilation includes the whole schema."""

_ORDER = (
    "format", "pattern", "oneOf", "patternProperties", "minProperties", "maxProperties", "multipleOf", "minLength",
    "maxLength", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const", "enum",
    "required", "additionalProperties", "prefixItems", "items", "allOf", "anyOf", "$ref", "properties", "type",
)  # fmt: skip
"""Keywords in the order in which their removal is tried: the least restrictive first."""

Compile = Callable[[str], Awaitable[Checked]]
"""Function that compiles the text of a grammar."""


class SearchError(Exception):
    """A search exceeded its budget."""


class SchemaSearch:
    """Search a schema for parts that do not compile, within a budget."""

    def __init__(self, compile_text: Compile) -> None:
        self._compile = compile_text
        self._checks = 0
        self._chars = 0
        self._seconds = 0.0

    async def locate(self, schema: dict[str, Any], error: str) -> Path:
        """Return the path of the innermost schema that does not compile, preferably with the same error.

        If the budget ends, returns the innermost one found so far.
        """
        path: Path = ()
        node: dict[str, Any] = schema
        whole, seen = _Parts(schema), {id(schema)}
        try:
            while True:
                found: tuple[Path, dict[str, Any]] | None = None
                for child_path, child in _within(path, node, schema):
                    if id(child) in seen or (reason := (await self._check(whole.at(child_path))).error) is None:
                        continue
                    if _head(reason) == _head(error):
                        found = child_path, child
                        break
                    found = found or (child_path, child)
                if found is None:
                    return path
                path, node = found
                seen.add(id(node))
        except SearchError:
            return path

    async def relax(self, schema: dict[str, Any]) -> list[tuple[Path, str]]:
        """Return the keywords to remove, in order, to make the schema compile.

        Raises SearchError if the compiler exceeds a limit, or the budget ends.
        """
        removed: list[tuple[Path, str]] = []
        while (checked := await self._check(schema)).error is not None:
            if checked.is_limit:
                raise SearchError
            path = await self.locate(schema, checked.error)
            key = await self._culprit(schema, path)
            removed.append((path, key))
            schema, _ = without_keyword(schema, path, key)
        return removed

    async def _culprit(self, schema: dict[str, Any], path: Path) -> str:
        """Return the keyword at a path without which the schema compiles, or else the first one."""
        node: Any = schema
        for step in path:
            node = node[step]
        keys = [key for key in _ORDER if key in node]
        if len(keys) > 1 and keys[-1] == "type":
            del keys[-1]  # Without a type, the other keywords may have no effect.
        for key in keys:
            changed, _ = without_keyword(schema, path, key)
            if (await self._check(_Parts(changed).at(path))).error is None:
                return key
        if not keys:
            raise SearchError
        return keys[0]

    async def _check(self, schema: dict[str, Any]) -> Checked:
        if self._checks >= MAX_CHECKS or self._chars > MAX_SEARCHED_CHARS or self._seconds > MAX_CPU_SECONDS:
            raise SearchError
        text = Grammar(schema_body(schema, as_schema=True), "", "").text
        checked = await self._compile(text)
        self._checks += 1
        self._chars += len(text)
        self._seconds += checked.seconds
        return checked


def _within(path: Path, node: dict[str, Any], root: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the direct object subschemas of a schema, with paths."""
    for step, child in subschemas(node):
        if isinstance(child, dict) and step[0] not in ("$defs", "definitions"):
            yield (*path, *step), child
    target = target_of(node, root)
    if target is not None:
        yield target


class _Parts:
    """Subschemas of a schema, each made self-contained."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._definitions: dict[str, Any] | None = None

    def at(self, path: Path) -> dict[str, Any]:
        """Return a self-contained schema equivalent to the one at a path."""
        if not path:
            return self._schema
        if self._definitions is None:
            self._definitions = {"root": rebase_references(self._schema, "#/$defs/root")}
        steps = (quote(str(step).replace("~", "~0").replace("/", "~1"), safe="~") for step in path)
        return {"$ref": "/".join(["#/$defs/root", *steps]), "$defs": self._definitions}


def _head(error: str) -> str:
    return error.partition("\n")[0]
