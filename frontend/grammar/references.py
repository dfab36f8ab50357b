"""Find references of a schema that lead to themselves without an end.

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
"""Passes over a schema; one that needs more is not judged."""
_MAX_PARTS = 20
"""Schemas that a value has to satisfy at once, beyond which they are not judged."""
_MAX_ITEMS = 50
_CONSTRAINTS = SUPPORTED_KEYWORDS - ANNOTATIONS - {"$defs", "definitions"}
_COMPOUND = {"object", "array"}
_DEFINITIONS = ("$defs", "definitions")


def endless_references(schema: dict[str, Any]) -> list[Path]:
    """Return the paths of the schemas with a `$ref` that no finite value satisfies.

    Included are those that the schema leads to, also where it does not require them: a model that begins with one never
    ends. References that do not resolve are left to others.
    """
    reached = _reached(schema)
    references = [path for path, node in reached if "$ref" in node]
    if not references:
        return []
    # A schema that is a part of itself has no finite value.
    parts = {id(node): _conjuncts(node, schema) for _, node in reversed(reached)}
    is_finite = dict.fromkeys(parts, False)
    # The least fixed point: what is finite is found from the inside out.
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
    """List the object schemas that a schema leads to, each once with its path."""
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
    """Return the object schema that a schema refers to, with its path, or None."""
    reference = node.get("$ref")
    if not isinstance(reference, str):
        return None
    try:
        path, target = resolve(reference, root)
    except KeyError:
        return None
    return (path, target) if isinstance(target, dict) else None


def _ends(parts: list[dict[str, Any]], is_finite: dict[int, bool]) -> bool:
    """Tell whether a finite value satisfies all parts, going by what is known of the schemas within them."""
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
    if not types or types - _COMPOUND:  # no type at all is the compiler's to report
        return True
    return ("object" in types and _object_ends(parts, ends)) or ("array" in types and _array_ends(parts, ends))


def _conjuncts(node: dict[str, Any], root: dict[str, Any]) -> list[dict[str, Any]]:
    """List the schemas that a value has to satisfy together; none if one of them is a part of itself.

    Those are a schema, what it refers to, and the parts of its `allOf`. More than _MAX_PARTS are not followed.
    """
    target = target_of(node, root)
    if target is not None and not _CONSTRAINTS & node.keys() - {"$ref"}:
        return [{"anyOf": [target[1]]}]  # However long a chain of references is, each is judged by the next.
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
    """Return the types that all parts admit; None for any."""
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
    least = max((count for count in counts if isinstance(count, int)), default=0)
    for part in parts:
        first = part.get("prefixItems")
        first = first if isinstance(first, list) else []
        for index in range(min(least, _MAX_ITEMS)):
            if not ends(first[index] if index < len(first) else part.get("items", True)):
                return False
    return True
