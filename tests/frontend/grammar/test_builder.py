"""Grammars that reach the engine, and those that never do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from tandem.frontend.config import ChatOptions, FrontendConfig
from tests.fakes.engine import FakeEngine
from tests.frontend.api.test_errors import error_of
from tests.frontend.conftest import RunningServer, post
from tests.support.byte_grammar import verdict

SPECIAL = {"<|begin|>": 0, "<|end|>": 1}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
        "strict": True,
    },
}


@pytest.fixture
def thinking(engine: FakeEngine, config: FrontendConfig, tmp_path: Path) -> Iterator[RunningServer]:
    """Start a server with a model that begins its answers with reasoning."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}<think>")
    engine.start()
    options = ChatOptions(template=template, tool_parser="hermes", reasoning_parser="think")
    running = RunningServer(structs.replace(config, chat=options)).start().ready()
    yield running
    running.stop()


@pytest.fixture
def calling(engine: FakeEngine, config: FrontendConfig, tmp_path: Path) -> Iterator[RunningServer]:
    """Start a server with a model that calls tools."""
    yield from start_calling(engine, config, tmp_path)


def start_calling(
    engine: FakeEngine, config: FrontendConfig, tmp_path: Path, **settings: Any
) -> Iterator[RunningServer]:
    template = tmp_path / "template.jinja"
    template.write_text("{{ tools and 1 }}{% for message in messages %}{{ message.content }}{% endfor %}")
    engine.start()
    options = ChatOptions(template=template, tool_parser="hermes")
    running = RunningServer(structs.replace(config, chat=options, **settings)).start().ready()
    yield running
    running.stop()


def complete(server: RunningServer, **fields: Any) -> httpx.Response:
    return post(server.url + "/v1/completions", json={"model": "fake-model", "prompt": "a", "max_tokens": 2, **fields})


def chat(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"model": "fake-model", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **fields}
    return post(server.url + "/v1/chat/completions", json=body)


def test_every_choice_gets_the_grammar_of_its_request(server: RunningServer, engine: FakeEngine) -> None:
    assert complete(server, regex="b+", n=2).status_code == 200
    first, second = engine.submits
    assert first.constraint is not None
    assert first.constraint == second.constraint
    assert verdict(first.constraint, "bb") == "whole"


def test_engine_learns_the_cpu_time_that_the_check_took_once(server: RunningServer, engine: FakeEngine) -> None:
    words = "|".join(f"{number:x}z.*" for number in range(4000))
    assert [complete(server, regex=words).status_code for _ in range(2)] == [200, 200]
    first, second = engine.submits
    assert first.constraint_seconds == second.constraint_seconds > 0


def test_free_text_has_no_grammar_and_starts_no_process(server: RunningServer, engine: FakeEngine) -> None:
    assert complete(server).status_code == 200
    assert complete(server, response_format={"type": "text"}).status_code == 200
    assert [(submit.constraint, submit.constraint_seconds) for submit in engine.submits] == [(None, 0.0)] * 2
    assert all(process.pid is None for process in server.server._service.grammars._processes)


def test_invalid_grammar_never_reaches_the_engine(server: RunningServer, engine: FakeEngine) -> None:
    for fields in ({"regex": "("}, {"grammar": "start: nowhere"}, {"grammar": "start: <[420000]>"}):
        response = complete(server, **fields)
        assert (response.status_code, error_of(response)["code"]) == (400, "invalid_grammar")
    assert engine.submits == []


def test_grammar_may_name_special_tokens_of_the_model(server: RunningServer, engine: FakeEngine) -> None:
    assert complete(server, grammar='start: "a" <|end|>').status_code == 200
    (submit,) = engine.submits
    assert submit.constraint is not None
    assert verdict(submit.constraint, "a<|end|>", SPECIAL) == "whole"


def test_reasoning_precedes_constrained_output(thinking: RunningServer, engine: FakeEngine) -> None:
    assert chat(thinking, response_format={"type": "json_object"}).status_code == 200
    assert chat(thinking, tools=[TOOL], tool_choice="required").status_code == 200
    constrained, called = (submit.constraint for submit in engine.submits)
    assert constrained is not None
    assert called is not None
    assert verdict(constrained, "hm</think>\n{}") == "whole"
    assert verdict(constrained, "{}") == "beginning"
    call = '<tool_call>\n{"name": "f", "arguments": {"a": null}}\n</tool_call>'
    assert verdict(called, "hm</think>\n\n" + call) == "whole"
    assert verdict(called, "hm</think>\n\nWell") == "wrong"


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


TEXT = {"type": "string"}
RELAXED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "look-ahead": ({**TEXT, "pattern": "^(?=.*[a-z]).+$"}, ["pattern"]),
    "word boundary": ({**TEXT, "pattern": r"\bid\b"}, ["pattern"]),
    "back reference": ({**TEXT, "pattern": r"^(.)\1$"}, ["pattern"]),
    "unclosed group": ({**TEXT, "pattern": "("}, ["pattern"]),
    "overlapping patterns": (
        {"type": "object", "patternProperties": {"^a": TEXT, "b$": {"type": "null"}}, "additionalProperties": False},
        ["patternProperties", "additionalProperties"],
    ),
    "count of a half": ({**TEXT, "minLength": 2.5}, ["minLength"]),
    "count as text": ({"type": "array", "minItems": "1"}, ["minItems"]),
    "no such type": ({"type": "any"}, ["type"]),
    "no such type among others": ({"type": ["string", "file"]}, ["type"]),
    "unresolvable reference": ({"$ref": "#/$defs/gone"}, ["$ref"]),
    "remote reference": ({"$ref": "https://example.org/schema.json"}, ["$ref"]),
    "reference to no schema": ({"$ref": "#/required"}, ["$ref"]),
    "required as a flag": ({**TEXT, "required": True}, ["required"]),
    "oneOf that may overlap": ({"oneOf": [{"type": "object"}, {"type": "object", "minProperties": 1}]}, ["oneOf"]),
    "negation": ({**TEXT, "not": {"const": "a"}}, ["not"]),
    "unique items": ({"type": "array", "uniqueItems": True}, ["uniqueItems"]),
    "property is no schema": ({"type": "object", "properties": {"b": "string"}}, ["properties"]),
    "nothing fits": ({"type": "integer", "minimum": 2, "maximum": 1}, ["minimum"]),
    "endless": ({"$ref": "#/properties/a"}, ["$ref"]),
}
"""Schemas of a property `a` by what is wrong with them, and the keywords that are removed."""


def tool_of(parameters: dict[str, Any], strict: bool | None = None, name: str = "loose") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def ignored_of(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [path for path in response.headers.get("x-tandem-ignored", "").split(",") if path]


def test_tools_that_are_not_strict_lose_what_does_not_compile(calling: RunningServer, engine: FakeEngine) -> None:
    named = {"type": "function", "function": {"name": "loose"}}
    for name, (part, keys) in RELAXED.items():
        tool = tool_of(object_of(a=part))
        for fields in (
            {"tools": [tool], "tool_choice": "required"},
            {"tools": [tool, TOOL], "tool_choice": named},
            {"tools": [TOOL, tool], "tool_choice": "auto"},
            {"functions": [tool["function"]], "function_call": {"name": "loose"}},
        ):
            field = "functions[].parameters" if "functions" in fields else "tools[].function.parameters"
            assert ignored_of(chat(calling, **fields)) == [f"{field}.properties.a.{key}" for key in keys], name
        assert ignored_of(chat(calling, tools=[tool])) == [], "free calls have no grammar"
        *constrained, free = engine.submits[-5:]
        assert all(submit.constraint for submit in constrained) and free.constraint is None, name


def test_strict_tools_are_refused_with_their_name_and_place(calling: RunningServer, engine: FakeEngine) -> None:
    for name, (part, _) in RELAXED.items():
        tools = [TOOL, tool_of(object_of(fine=TEXT, a=part), strict=True, name="strict")]
        for choice in ("auto", "required"):
            error = error_of(response := chat(calling, tools=tools, tool_choice=choice))
            assert (response.status_code, error["param"], error["code"]) == (400, "tools", "invalid_json_schema"), name
            assert "'strict'" in error["message"] and "#/properties/a" in error["message"], name
    assert engine.submits == []


def test_response_formats_that_are_not_strict_lose_what_does_not_compile(
    server: RunningServer, engine: FakeEngine
) -> None:
    for name, (part, keys) in RELAXED.items():
        schema = object_of(a=part)
        form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        for fields, path in (
            ({"response_format": form}, "response_format.json_schema.schema"),
            ({"guided_json": schema}, "guided_json"),
            ({"structured_outputs": {"json": schema}}, "structured_outputs.json"),
        ):
            assert ignored_of(complete(server, **fields)) == [f"{path}.properties.a.{key}" for key in keys], name
        form["json_schema"]["strict"] = True
        error = error_of(response := complete(server, response_format=form))
        assert (response.status_code, error["code"]) == (400, "invalid_json_schema"), name
        assert "at #/properties/a" in error["message"], name
    assert len(engine.submits) == 3 * len(RELAXED)


def test_other_routes_name_what_was_removed(calling: RunningServer) -> None:
    for name, (part, keys) in RELAXED.items():
        schema = object_of(a=part)
        message = {"model": "fake-model", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
        loose = {"name": "loose", "input_schema": schema}
        for choice in ({"type": "any"}, {"type": "tool", "name": "loose"}):
            answer = post(calling.url + "/v1/messages", json={**message, "tools": [loose], "tool_choice": choice})
            assert ignored_of(answer) == [f"tools[].input_schema.properties.a.{key}" for key in keys], name
        response = {"model": "fake-model", "input": "a", "max_output_tokens": 16}
        function = {"type": "function", "name": "loose", "parameters": schema}
        for tool, fields in (
            ({**function, "strict": False}, {"tool_choice": "required"}),
            (function, {"tool_choice": {"type": "function", "name": "loose"}}),
        ):
            answer = post(calling.url + "/v1/responses", json={**response, "tools": [tool], **fields})
            assert ignored_of(answer) == [f"tools[].parameters.properties.a.{key}" for key in keys], name
        assert post(calling.url + "/v1/responses", json={**response, "tools": [function]}).status_code == 200, name
        text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": False}}
        answer = post(calling.url + "/v1/responses", json={**response, "text": text})
        assert ignored_of(answer) == [f"text.format.schema.properties.a.{key}" for key in keys], name


def test_custom_tool_loses_an_expression_that_does_not_compile(calling: RunningServer) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "("}
    body = {"model": "fake-model", "input": "a", "tools": [{"type": "custom", "name": "c", "format": form}]}
    answer = post(calling.url + "/v1/responses", json=body)
    assert ignored_of(answer) == ["tools[].parameters.properties.input.pattern"]


def test_what_was_removed_is_named_each_time_and_searched_once(calling: RunningServer, engine: FakeEngine) -> None:
    tools = [tool_of(object_of(a=RELAXED["back reference"][0])), tool_of({"type": "object"}, name="other")]
    first, second = (ignored_of(chat(calling, tools=tools, tool_choice="required")) for _ in range(2))
    assert first == second == ["tools[].function.parameters.properties.a.pattern"]
    assert len({submit.constraint for submit in engine.submits}) == 1


def test_tool_of_too_large_a_schema_takes_any_object(calling: RunningServer, engine: FakeEngine) -> None:
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"type": "object", "properties": {"a": deep}}
    assert ignored_of(chat(calling, tools=[tool_of(deep)], tool_choice="required")) == ["tools[].function.parameters"]
    (submit,) = engine.submits
    assert submit.constraint is not None
    error = error_of(chat(calling, tools=[tool_of(deep, strict=True)]))
    assert error["code"] == "invalid_json_schema" and "'loose'" in error["message"]


def test_tools_that_are_too_large_together_take_any_object(calling: RunningServer, engine: FakeEngine) -> None:
    quotes = '"' * 90
    # Each quote takes two characters in the request, and four in a grammar.
    wide = object_of(a={"enum": [f"{number}{quotes}" for number in range(600)]})
    exact = {**TOOL["function"], "name": "exact"}  # type: ignore[dict-item]
    tools = [*(tool_of(wide, name=f"t{number}") for number in range(8)), {"type": "function", "function": exact}]
    assert ignored_of(chat(calling, tools=tools, tool_choice="required")) == ["tools[].function.parameters"]
    constraint = engine.submits[-1].constraint
    assert constraint is not None
    call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    assert verdict(constraint, call.format("t4", '{"any": [1]}')) == "whole"
    assert verdict(constraint, call.format("exact", '{"a": null}')) == "whole"
    assert verdict(constraint, call.format("exact", '{"any": [1]}')) == "wrong"
    for tool in tools:
        tool["function"]["strict"] = True  # type: ignore[index]
    error = error_of(chat(calling, tools=tools, tool_choice="required"))
    assert error["code"] == "invalid_grammar"


def test_removed_keywords_are_refused_where_unknown_fields_are(
    engine: FakeEngine, config: FrontendConfig, tmp_path: Path
) -> None:
    for running in start_calling(engine, config, tmp_path, unknown_fields="refuse"):
        tools = [tool_of(object_of(a=RELAXED["back reference"][0]))]
        error = error_of(response := chat(running, tools=tools, tool_choice="required"))
        assert (response.status_code, error["code"]) == (400, "unknown_parameter")
