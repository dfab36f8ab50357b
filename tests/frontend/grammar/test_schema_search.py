"""Schemas that the compiler refuses: which keywords are found, and where."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tandem.frontend.grammar import schema_search as search_module
from tandem.frontend.grammar.checker import GrammarChecker
from tandem.frontend.grammar.relaxed_schema import relax_schema, rewrite_schema, without_keyword
from tandem.frontend.grammar.schema_search import SearchError

Search = Callable[[GrammarChecker], Coroutine[Any, Any, None]]


def with_checker(body: Search) -> None:
    async def run() -> None:
        checker = GrammarChecker(500, {})
        try:
            await body(checker)
        finally:
            await checker.close()

    asyncio.run(run())


TEXT, OBJECT = {"type": "string"}, {"type": "object"}
OVERLAPPING = {"^a": TEXT, "b$": {"type": "integer"}}
DYNAMIC: list[tuple[dict[str, Any], list[str]]] = [
    ({"type": "string", "pattern": r"\bword\b"}, ["pattern"]),
    ({"type": "string", "pattern": r"^(a)\1$"}, ["pattern"]),
    ({"type": "string", "pattern": "("}, ["pattern"]),
    ({"type": "string", "pattern": "^a$", "maxLength": 0, "minLength": 2}, ["pattern", "minLength"]),
    ({"type": "object", "patternProperties": OVERLAPPING}, ["patternProperties"]),
    ({"type": "object", "patternProperties": OVERLAPPING, "additionalProperties": False},
     ["patternProperties", "additionalProperties"]),
    ({"oneOf": [OBJECT, {"type": "object", "required": ["a"]}]}, ["oneOf"]),
    ({"type": "object", "properties": {"a": TEXT, "b": TEXT}, "minProperties": 2}, ["minProperties"]),
    ({"type": "number", "minimum": 3, "maximum": 2}, ["minimum"]),
    ({"type": "number", "multipleOf": 1e-15}, ["multipleOf"]),
    ({"allOf": [TEXT, {"type": "null"}]}, ["allOf"]),
    ({"enum": []}, ["enum"]),
    ({"anyOf": []}, ["anyOf"]),
    ({"type": "array", "minItems": 1, "items": False}, ["minItems"]),
]  # fmt: skip
NESTED: list[Callable[[dict[str, Any]], tuple[dict[str, Any], str]]] = [
    lambda part: (part, "#"),
    lambda part: ({"type": "object", "properties": {"x": {"type": "array", "items": part, "minItems": 1}},
                   "required": ["x"]}, "#/properties/x/items"),
    lambda part: ({"properties": {"a b/~%é": part}, "required": ["a b/~%é"], "type": "object"},
                  "#/properties/a b~1~0%é"),
    lambda part: ({"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "minItems": 1, "prefixItems": [part]}}},
                  "#/$defs/t/prefixItems/0"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "keys"), DYNAMIC)
def test_keywords_that_do_not_compile_are_found_wherever_they_are(part: dict[str, Any], keys: list[str]) -> None:
    async def body(checker: GrammarChecker) -> None:
        for nest in NESTED:
            schema, pointer = nest(part)
            relaxed, static = relax_schema(rewrite_schema(schema))
            assert static == []
            names: list[str] = []
            for path, key in await checker.search().relax(relaxed):
                relaxed, removed = without_keyword(relaxed, path, key)
                names += removed
            assert names == [f"{pointer}/{key}" for key in keys]

    with_checker(body)


def test_several_keywords_are_removed_and_the_rest_is_kept() -> None:
    schema = {
        "type": "object",
        "properties": {
            "fine": {"type": "string", "pattern": "^[a-z]+$"},
            "bad": {"type": "string", "pattern": r"\bx", "maxLength": 5},
            "more": {"anyOf": [{"type": "string", "pattern": r"(a)\1"}, {"type": "null"}]},
        },
        "required": ["fine", "bad", "more"],
    }

    async def body(checker: GrammarChecker) -> None:
        assert await checker.search().relax(schema) == [
            (("properties", "bad"), "pattern"),
            (("properties", "more", "anyOf", 0), "pattern"),
        ]

    with_checker(body)


def test_search_ends_with_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "MAX_CHECKS", 5)
    schema = {"properties": {f"p{index}": {"type": "string", "pattern": r"\bx"} for index in range(9)}}

    async def body(checker: GrammarChecker) -> None:
        with pytest.raises(SearchError):
            await checker.search().relax(schema)

    with_checker(body)
