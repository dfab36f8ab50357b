"""Outputs with calls of tools: what the grammar takes, in every form of writing them."""

import json
from typing import Any

import pytest

from tandem.frontend.errors import ApiError
from tandem.frontend.grammar.grammar import Grammar, output_grammar
from tandem.frontend.grammar.tool_calls import (
    GENERIC_JSON,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_NAMED,
    MISTRAL_WITH_IDS,
    CallSyntax,
    tool_grammar,
)
from tandem.frontend.request.tools import Tool, ToolChoice, ToolUse
from tests.support.byte_grammar import verdict

SPECIAL = {"[TOOL_CALLS]": 400, "<tool_call>": 401, "[ARGS]": 402, "[CALL_ID]": 403}
FORMS: list[tuple[CallSyntax, dict[str, int]]] = [
    (form, special)
    for form in (HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_NAMED, MISTRAL_WITH_IDS, GENERIC_JSON)
    for special in ({}, SPECIAL)
]

WEATHER = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/place"}, "unit": {"enum": ["C", "F"]}},
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "string"}},
}
STRICT = Tool("weather", WEATHER, True, {})
LOOSE = Tool("clock", {"properties": {"zone": {"not": {}}}, "additionalProperties": True}, False, {})
EMPTY = Tool("ping", None, True, {})

GOOD, BAD = {"place": "Köln"}, {"place": 3}


def use(*tools: Tool, mode: Any = "required", name: str | None = None, parallel: bool = True) -> ToolUse:
    return ToolUse(tools, ToolChoice(mode, name), parallel)


def call(form: CallSyntax, name: str, arguments: object) -> str:
    if form.arguments_tag:
        call_id = f"{form.id_tag}abcdefg12" if form.id_tag else ""
        return name + call_id + form.arguments_tag + json.dumps(arguments, ensure_ascii=False)
    return json.dumps({"name": name, form.arguments: arguments}, ensure_ascii=False)


def written(form: CallSyntax, *calls: str) -> str:
    return form.opening + form.between.join(form.before + one + form.after for one in calls) + form.closing


def text_of(grammar: Grammar | None) -> str:
    assert grammar is not None
    return grammar.text


@pytest.mark.parametrize(("form", "special"), FORMS)
def test_required_call_follows_format_and_schema(form: CallSyntax, special: dict[str, int]) -> None:
    text = text_of(tool_grammar(use(STRICT, LOOSE, EMPTY), form, special))

    def judged(*calls: str) -> str:
        return verdict(text, written(form, *calls), special)

    good = call(form, "weather", GOOD)
    assert judged(good) == judged(good, call(form, "clock", {"zone": [1]}), good) == "whole"
    assert judged(call(form, "ping", {})) == "whole"
    for wrong in (
        call(form, "weather", BAD),
        call(form, "weather", {**GOOD, "more": 1}),
        call(form, "ping", {"a": 1}),
        call(form, "clock", []),
        call(form, "other", {}),
    ):
        assert judged(wrong) == judged(good, wrong) == "wrong"
    assert verdict(text, "Well, " + written(form, good), special) == "wrong"
    assert verdict(text, "", special) == "beginning"


@pytest.mark.parametrize(("form", "special"), FORMS)
@pytest.mark.parametrize("tool_use", [use(STRICT, LOOSE, parallel=False), use(STRICT, LOOSE, name="weather")])
def test_grammar_allows_exactly_one_call_without_parallel_calls(
    form: CallSyntax, special: dict[str, int], tool_use: ToolUse
) -> None:
    text = text_of(tool_grammar(tool_use, form, special))
    good = call(form, "weather", GOOD)
    assert verdict(text, written(form, good), special) == "whole"
    assert verdict(text, written(form, good, good), special) == "wrong"


@pytest.mark.parametrize(("form", "special"), FORMS)
def test_named_choice_allows_only_that_tool(form: CallSyntax, special: dict[str, int]) -> None:
    text = text_of(tool_grammar(use(STRICT, EMPTY, name="ping"), form, special))
    assert verdict(text, written(form, call(form, "ping", {})), special) == "whole"
    assert verdict(text, written(form, call(form, "weather", GOOD)), special) == "wrong"


@pytest.mark.parametrize(("form", "special"), FORMS)
def test_auto_choice_allows_text_or_calls(form: CallSyntax, special: dict[str, int]) -> None:
    text = text_of(tool_grammar(use(STRICT, LOOSE, mode="auto"), form, special))
    for free in ("", "hello", "say {", "a <tool b", "[x](y)", "grüße\n\n- a"):
        assert verdict(text, free, special) == "whole", free
    good = call(form, "weather", GOOD)
    assert verdict(text, written(form, good, good), special) == "whole"
    assert verdict(text, written(form, call(form, "weather", BAD)), special) == "wrong"
    said = verdict(text, "I look: " + written(form, call(form, "weather", BAD)), special)
    assert said == ("wrong" if form.trigger else "whole")


@pytest.mark.parametrize("form", [LLAMA3_JSON, GENERIC_JSON])
@pytest.mark.parametrize("text", ['{"a', "\n {", "[{", "[ {"])
def test_brace_starts_a_call_when_syntax_has_no_trigger(form: CallSyntax, text: str) -> None:
    grammar = text_of(tool_grammar(use(STRICT, mode="auto"), form, {}))
    assert verdict(grammar, text + "x") == "wrong"


@pytest.mark.parametrize(("form", "special"), FORMS)
def test_response_format_allows_json_or_calls(form: CallSyntax, special: dict[str, int]) -> None:
    schema = {"type": "object", "properties": {"answer": {"$ref": "#/$defs/a"}}, "required": ["answer"]}
    content = output_grammar(
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "$defs": {"a": {"type": "null"}}}}},
        None, (), None,
    )  # fmt: skip
    text = text_of(tool_grammar(use(STRICT, mode="auto"), form, special, content))
    assert verdict(text, '{"answer": null}', special) == "whole"
    assert verdict(text, written(form, call(form, "weather", GOOD)), special) == "whole"
    assert verdict(text, '{"answer": 1', special) == verdict(text, "Well", special) == "wrong"
    only_calls = tool_grammar(use(STRICT), form, special, content)
    assert verdict(text_of(only_calls), '{"answer": null}', special) == "wrong"


@pytest.mark.parametrize("special", [{}, SPECIAL])
def test_named_calls_take_an_id_only_where_their_format_has_one(special: dict[str, int]) -> None:
    with_ids = text_of(tool_grammar(use(STRICT, EMPTY), MISTRAL_WITH_IDS, special))
    without = text_of(tool_grammar(use(STRICT, EMPTY), MISTRAL_NAMED, special))
    plain, identified = "[TOOL_CALLS]ping[ARGS]{}", "[TOOL_CALLS]ping[CALL_ID]abcdefg12[ARGS]{}"
    assert [verdict(with_ids, plain * 2, special), verdict(with_ids, identified * 2, special)] == ["whole"] * 2
    assert [verdict(without, plain * 2, special), verdict(without, identified, special)] == ["whole", "wrong"]
    for wrong in ("[TOOL_CALLS]ping[CALL_ID]abc[ARGS]{}", "[TOOL_CALLS]ping{}", '[TOOL_CALLS]{"name": "ping"}'):
        assert verdict(with_ids, wrong, special) == "wrong"


def test_a_tag_that_is_one_token_cannot_be_spelled_by_others() -> None:
    text = text_of(tool_grammar(use(EMPTY, mode="auto"), HERMES, SPECIAL))
    assert verdict(text, "<tool_call> is spelled", {}) == "whole"
    assert verdict(text, "<tool_call> is no call", SPECIAL) == "wrong"
    assert verdict(text_of(tool_grammar(use(EMPTY), HERMES, SPECIAL)), '<tool_call>\n{"', {}) == "wrong"


def test_tool_grammar_is_none_when_nothing_is_strict_or_required() -> None:
    content = output_grammar(None, "a", (), None)
    assert tool_grammar(use(LOOSE, mode="auto"), HERMES, {}) is None
    assert tool_grammar(use(STRICT, mode="none"), HERMES, {}) is None
    assert tool_grammar(use(STRICT, mode="none"), HERMES, {}, content) is content
    assert tool_grammar(use(), HERMES, {}, content) is content


def test_regex_cannot_be_combined_with_tools() -> None:
    content = output_grammar(None, "a", (), None)
    with pytest.raises(ApiError, match=r"'regex'.*'tools'") as caught:
        tool_grammar(use(STRICT), HERMES, {}, content)
    assert (caught.value.status, caught.value.param) == (400, "regex")


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        (Tool("t", {"properties": {"a": {"not": {}}}}, True, {}), "at #/properties/a: "),
        (Tool("t", {"items": {"$ref": "http://x"}}, True, {}), "at #/items: $ref "),
    ],
)
def test_strict_tool_with_unsupported_schema_is_rejected(tool: Tool, text: str) -> None:
    with pytest.raises(ApiError) as caught:
        tool_grammar(use(tool), HERMES, {})
    assert (caught.value.status, caught.value.param) == (400, "tools")
    assert "'t'" in caught.value.message and text in caught.value.message


def test_lenient_tool_is_constrained_by_the_supported_part_of_its_schema() -> None:
    tool = Tool("t", {"type": "object", "properties": {"a": {"type": "integer", "not": {}}}}, False, {})
    text = text_of(tool_grammar(use(tool), GENERIC_JSON, {}))
    assert verdict(text, call(GENERIC_JSON, "t", {"a": 1})) == "whole"
    assert verdict(text, call(GENERIC_JSON, "t", {"a": "x"})) == "wrong"
