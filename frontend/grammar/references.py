"""Find endless references in a schema, which no finite value satisfies.

The compiler accepts them, but no output would ever be complete.
"""

from collections.abc import Callable
from typing import Any

from tandem.frontend.grammar.json_schema import (
    ANNOTATIONS,
    SUPPORTED_KEYWORDS,
    Path,
    SchemaError,
    join_pointer,
    resolve,
    subschemas,
)

_MAX_PASSES = 20
"""Maximum number of passes over a schema; schemas that need more are accepted."""
_MAX_PARTS = 20
"""Maximum number of schemas that a value has to satisfy at once; beyond it they are accepted."""
_MAX_ITEMS = 50
_CONSTRAINTS = SUPPORTED_KEYWORDS - ANNOTATIONS - {"$defs", "definitions"}
_COMPOUND = {"object", "array"}
_DEFINITIONS = ("$defs", "definitions")


def endless_references(schema: dict[str, Any]) -> list[Path]:
    """Return the paths of schemas with a `$ref` that no finite value satisfies.

    Includes optional parts: a model that starts writing one never finishes. Ignores references that do not resolve.
    """
    reached = _reached(schema)
    references = [path for path, node in reached if "$ref" in node]
    if not references:
        return []
    # A schema that contains itself has no finite value.
    parts = {id(node): _conjuncts(node, schema) for _, node in reversed(reached)}
    is_finite = dict.fromkeys(parts, False)
    # Compute the least fixed point: inner schemas are found to be finite first.
    for _ in range(_MAX_PASSES):
        found = [
            each for each, together in parts.items() if together and not is_finite[each] and _ends(together, is_finite)
        ]
        if not found:
            endless = {path for path, node in reached if not is_finite[id(node)]}
            return [path for path in references if path in endless]
        is_finite.update(dict.fromkeys(found, True))
    return []


def check_references(schema: dict[str, Any]) -> None:
    """Raise SchemaError for a reference that no finite value satisfies."""
    for path in endless_references(schema):
        raise SchemaError(join_pointer("#", *path), "$ref leads to itself without an end; give it another option")


def _reached(schema: dict[str, Any]) -> list[tuple[Path, dict[str, Any]]]:
    """List the object schemas reachable from a schema, each once, with paths."""
    found: dict[int, tuple[Path, dict[str, Any]]] = {}
    stack: list[tuple[Path, object]] = [((), schema)]
    while stack:
        path, node = stack.pop()
        if not isinstance(node, dict) or id(node) in found:
            continue
        found[id(node)] = (path, node)
        stack += [((*path, *step), child) for step, child in subschemas(node) if step[0] not in _DEFINITIONS]
        target = target_of(node, schema)
        if target is not None:
            stack.append(target)
    return list(found.values())


def target_of(node: dict[str, Any], root: dict[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    """Return the object schema that a schema's `$ref` points to, with its path, or None."""
    reference = node.get("$ref")
    if not isinstance(reference, str):
        return None
    try:
        path, target = resolve(reference, root)
    except KeyError:
        return None
    return (path, target) if isinstance(target, dict) else None


def _ends(parts: list[dict[str, Any]], is_finite: dict[int, bool]) -> bool:
    """Return True if a finite value satisfies all parts, according to `is_finite` of their subschemas."""
    if len(parts) > _MAX_PARTS:
        return True

    def ends(child: object) -> bool:
        return not isinstance(child, dict) or is_finite.get(id(child), True)

    for part in parts:
        for key in ("anyOf", "oneOf"):
            options = part.get(key)
            if isinstance(options, list) and options and not any(map(ends, options)):
                return False
    if any("const" in part or "enum" in part for part in parts):
        return True
    types = _common_types(parts)
    if not types or types - _COMPOUND:  # the compiler reports contradicting types
        return True
    return ("object" in types and _object_ends(parts, ends)) or ("array" in types and _array_ends(parts, ends))


def _conjuncts(node: dict[str, Any], root: dict[str, Any]) -> list[dict[str, Any]]:
    """List the schemas that a value has to satisfy at once; empty if one of them contains itself.

    These are the schema, its `$ref` target, and the parts of its `allOf`, at most _MAX_PARTS.
    """
    target = target_of(node, root)
    if target is not None and not _CONSTRAINTS & node.keys() - {"$ref"}:
        return [{"anyOf": [target[1]]}]  # In a chain of references, the result of each follows from the next one.
    found: list[dict[str, Any]] = []
    stack: list[tuple[dict[str, Any], frozenset[int]]] = [(node, frozenset())]
    while stack and len(found) <= _MAX_PARTS:
        part, above = stack.pop()
        if id(part) in above:
            return []
        found.append(part)
        within = above | {id(part)}
        target, every = target_of(part, root), part.get("allOf")
        stack += [(each, within) for each in (every if isinstance(every, list) else ()) if isinstance(each, dict)]
        if target is not None:
            stack.append((target[1], within))
    return found


def _common_types(parts: list[dict[str, Any]]) -> set[str] | None:
    """Return the types that all parts allow; None for any type."""
    common: set[str] | None = None
    for part in parts:
        if "type" in part:
            given = part["type"]
            kinds = {kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)}
            if "number" in kinds:
                kinds.add("integer")
            common = kinds if common is None else common & kinds
    return common


def _object_ends(parts: list[dict[str, Any]], ends: Callable[[object], bool]) -> bool:
    required: set[str] = set()
    for part in parts:
        names = part.get("required")
        required |= {name for name in (names if isinstance(names, list) else []) if isinstance(name, str)}
    for part in parts:
        named = part.get("properties")
        named = named if isinstance(named, dict) else {}
        others = part.get("additionalProperties", True)
        is_open = "patternProperties" in part
        if not all(ends(named[name]) if name in named else is_open or ends(others) for name in required):
            return False
    return True


def _array_ends(parts: list[dict[str, Any]], ends: Callable[[object], bool]) -> bool:
    counts = [part.get("minItems", 0) for part in parts]
    min_items = max((count for count in counts if isinstance(count, int)), default=0)
    for part in parts:
        first = part.get("prefixItems")
        first = first if isinstance(first, list) else []
        for index in range(min(min_items, _MAX_ITEMS)):
            if not ends(first[index] if index < len(first) else part.get("items", True)):
                return False
    return True
