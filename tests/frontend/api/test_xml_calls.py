"""A model of Qwen3.5's template, whose calls are XML and whose prompt opens reasoning, on the three chat routes."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.protocol.codec import unpack_ids
from tests.frontend.conftest import post
from tests.support.byte_grammar import verdict
from tests.support.chat_routes import IDS, QUESTION, RAW, ROUTES, Route
from tests.support.published_templates import PUBLISHED
from tests.support.shared_frontend import SharedFrontend, shared_frontend

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "at": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "deep": {"type": "boolean"},
        "until": {"type": ["string", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "options": {"type": "object"},
    },
    "required": ["at"],
}
ARGUMENTS = {
    "at": "köln\n\n<b>12</b>\n",
    "count": 3,
    "ratio": 0.5,
    "deep": True,
    "until": None,
    "tags": ["a", "b"],
    "options": {"x": [1, None]},
}
CALL = (
    "<tool_call>\n<function=look>\n<parameter=at>\nköln\n\n<b>12</b>\n\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
    "<parameter=ratio>\n0.5\n</parameter>\n<parameter=deep>\nTrue\n</parameter>\n<parameter=until>\nnull\n</parameter>\n"
    '<parameter=tags>\n["a", "b"]\n</parameter>\n<parameter=options>\n{"x": [1, null]}\n</parameter>\n</function>\n'
    "</tool_call>"
)
SHORT = "<tool_call>\n<function=look>\n<parameter=at>\nhere\n</parameter>\n</function>\n</tool_call>"
MALFORMED = "<tool_call>\n<function=look>\nat: here\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedFrontend]:
    folder = tmp_path_factory.mktemp("model")
    RAW.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(PUBLISHED["qwen3_5"]["default"])
    (folder / "config.json").write_text('{"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}')
    with shared_frontend(folder) as running:
        yield running


@pytest.fixture
def server(shared: SharedFrontend) -> SharedFrontend:
    shared.renewed_engine()
    return shared


def prompt_of(server: SharedFrontend) -> str:
    text: str = RAW.decode(unpack_ids(server.engine.submits[-1].prompt_ids), skip_special_tokens=False)
    return text


def unthinking(path: str) -> dict[str, Any]:
    """Return the fields that turn reasoning off."""
    return {
        "chat": {"chat_template_kwargs": {"enable_thinking": False}},
        "messages": {"thinking": {"type": "disabled"}},
        "responses": {"reasoning": {"effort": "none"}},
    }[path]


def limited(path: str, count: int) -> dict[str, Any]:
    return {"max_output_tokens" if path == "responses" else "max_tokens": count}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_arguments_of_every_type_and_several_calls(server: SharedFrontend, path: str, stream: bool) -> None:
    text = f"I think.\n</think>\n\nI look.\n\n{CALL}\n{SHORT}"
    for per_step in (1, 7, 1000):
        server.engine.tokens_per_step = per_step
        answer = Route(path, server, PARAMETERS).ask(text, stream, tools=True, **limited(path, 800))
        assert (answer.reasoning, answer.content) == ("I think.", "I look.")
        assert [name for name, _ in answer.calls] == ["look", "look"]
        assert [json.loads(arguments) for _, arguments in answer.calls] == [ARGUMENTS, {"at": "here"}]
        assert answer.ending in ("tool_calls", "tool_use", "completed")
    assert prompt_of(server).endswith("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_within_reasoning_count_at_its_end_only(server: SharedFrontend, path: str, stream: bool) -> None:
    fields = {"tools": True, "skip_special_tokens": False}
    answer = Route(path, server, PARAMETERS).ask(f"Like {SHORT}?</think>{SHORT}", stream, **fields)
    assert (answer.reasoning, answer.content) == (f"Like {SHORT}?", "")
    assert [json.loads(arguments) for _, arguments in answer.calls] == [{"at": "here"}]
    unclosed = Route(path, server, PARAMETERS).ask(f"Like {SHORT}", stream, **fields)
    assert (unclosed.reasoning, [json.loads(arguments) for _, arguments in unclosed.calls]) == (
        "Like",
        [{"at": "here"}],
    )
    assert unclosed.ending in ("tool_calls", "tool_use", "completed")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_can_be_turned_off(server: SharedFrontend, path: str, stream: bool) -> None:
    answer = Route(path, server, PARAMETERS).ask(f"I look.\n{SHORT}", stream, tools=True, **unthinking(path))
    assert prompt_of(server).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert (answer.reasoning, answer.content, len(answer.calls)) == ("", "I look.", 1)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_malformed_calls_are_text(server: SharedFrontend, path: str, stream: bool) -> None:
    answer = Route(path, server, PARAMETERS).ask(f"</think>{MALFORMED}", stream, tools=True, skip_special_tokens=False)
    assert (answer.content, answer.calls) == (MALFORMED, [])
    assert answer.ending in ("stop", "end_turn", "completed")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_truncated_calls_are_alike_streamed_and_whole(server: SharedFrontend, path: str, mode: str) -> None:
    text = f"</think>{CALL}"
    num_tokens = len(RAW.encode(text, add_special_tokens=False).ids)
    choice: Any = {"type": "any" if mode == "required" else mode} if path == "messages" else mode
    route, seen = Route(path, server, PARAMETERS), 0
    server.engine.step_seconds = 0.0
    for count in range(1, num_tokens, 9):
        fields = {"tools": True, "tool_choice": choice, "skip_special_tokens": False, **limited(path, count)}
        whole, streamed = route.ask(text, False, **fields), route.ask(text, True, **fields)
        assert whole.ending == streamed.ending
        assert whole.ending in ("length", "max_tokens", "incomplete")
        assert whole.content == streamed.content
        assert whole.content == "" if mode == "required" else CALL.startswith(whole.content)
        assert [name for name, _ in whole.calls] == [name for name, _ in streamed.calls]
        if path != "messages":  # A whole message has the input as an object.
            assert whole.calls == streamed.calls
        for _, arguments in streamed.calls:
            assert json.dumps(ARGUMENTS, ensure_ascii=False).startswith(arguments.removesuffix("\ufffd"))
        seen += bool(whole.calls)
    assert seen > 10


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_grammar_enforces_the_format_after_reasoning(server: SharedFrontend, path: str, choice: str) -> None:
    given: Any = {
        "chat": {"type": "function", "function": {"name": "look"}} if choice == "named" else choice,
        "messages": {"auto": {"type": "auto"}, "required": {"type": "any"}, "named": {"type": "tool", "name": "look"}}[
            choice
        ],
        "responses": {"type": "function", "name": "look"} if choice == "named" else choice,
    }[path]
    strict = Route(path, server, {**PARAMETERS, "additionalProperties": False}, strict=True)
    answer = strict.ask(f"Hm</think>\n\n{SHORT}", False, tools=True, tool_choice=given)
    assert [json.loads(arguments) for _, arguments in answer.calls] == [{"at": "here"}]
    constraint = server.engine.submits[-1].constraint
    assert constraint is not None
    call = CALL.replace("True", "true")
    for text in (f"Hm</think>\n\n{SHORT}", f"</think>{call}"):
        assert verdict(constraint, text, IDS) == "whole", text
    several = f"Hm</think>{call}\n{SHORT}"
    assert verdict(constraint, several, IDS) == ("wrong" if choice == "named" else "whole")
    assert verdict(constraint, "Hm</think>Well", IDS) == ("whole" if choice == "auto" else "wrong")
    for wrong in (call.replace("0.5", "half"), call.replace("look", "see"), SHORT.replace("=at", "=on")):
        assert verdict(constraint, f"</think>{wrong}", IDS) == "wrong"
    if choice == "auto":
        Route(path, server, PARAMETERS).ask("x", False, tools=True)
        assert server.engine.submits[-1].constraint is None


@pytest.mark.parametrize("path", ROUTES)
def test_one_call_without_parallel_calls(server: SharedFrontend, path: str) -> None:
    fields: dict[str, Any] = {"parallel_tool_calls": False, "tool_choice": "required"}
    if path == "messages":
        fields = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    answer = Route(path, server, PARAMETERS).ask(f"</think>{SHORT}\n{CALL}", False, tools=True, **fields)
    assert len(answer.calls) == 1
    constraint = server.engine.submits[-1].constraint
    assert constraint is not None
    assert verdict(constraint, f"</think>{SHORT}", IDS) == "whole"
    assert verdict(constraint, f"</think>{SHORT}\n{SHORT}", IDS) == "wrong"


def history(path: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the field of a conversation with a call and its result."""
    if path == "chat":
        function = {"name": "look", "arguments": json.dumps(arguments)}
        call = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        }
        return {"messages": [QUESTION, call, {"role": "tool", "tool_call_id": "c1", "content": "rain"}]}
    if path == "messages":
        use = {"type": "tool_use", "id": "c1", "name": "look", "input": arguments}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": "rain"}
        return {"messages": [QUESTION, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]}
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": json.dumps(arguments)}
    return {"messages": [QUESTION, call, {"type": "function_call_output", "call_id": "c1", "output": "rain"}]}


@pytest.mark.parametrize("path", ROUTES)
def test_calls_of_the_history_are_rendered_as_the_model_wrote_them(server: SharedFrontend, path: str) -> None:
    Route(path, server, PARAMETERS).ask("so</think>rain", False, tools=True, **history(path, ARGUMENTS))
    prompt, written = prompt_of(server), CALL.replace("\nnull\n", "\nNone\n")
    assert f"<think>\n\n</think>\n\n{written}<|im_end|>" in prompt
    assert "<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n" in prompt


@pytest.mark.parametrize("stream", [False, True])
def test_input_of_a_custom_tool_is_the_text_of_its_parameter(server: SharedFrontend, stream: bool) -> None:
    script = 'print("köln")\n\nprint(</parameter>)\n'
    call = f"<tool_call>\n<function=run>\n<parameter=input>\n{script}\n</parameter>\n</function>\n</tool_call>"
    ids = RAW.encode(f"</think>{call}", add_special_tokens=False).ids
    server.engine.script = lambda _: ids
    tool = {"type": "custom", "name": "run", "format": {"type": "grammar", "syntax": "regex", "definition": "(.|\n)+"}}
    body = {"model": "fake-model", "input": [QUESTION], "tools": [tool], "stream": stream}
    response = post(f"{server.server.url}/v1/responses", json={**body, "tool_choice": "required"})
    last = json.loads(response.text.rpartition("\ndata: ")[2])
    reply = last["response"] if stream else last
    assert [item["input"] for item in reply["output"] if item["type"] == "custom_tool_call"] == [script]
    constraint = server.engine.submits[-1].constraint
    assert constraint is not None
    assert verdict(constraint, f"</think>{call}", IDS) == "whole"
    assert verdict(constraint, f"</think>{call.replace(script, '')}", IDS) == "wrong"


def test_keywords_that_the_grammar_leaves_out_are_named(server: SharedFrontend) -> None:
    properties = {"at": {"type": "string", "format": "date"}}
    function = {"name": "look", "parameters": {"type": "object", "properties": properties}}
    body = {"model": "fake-model", "messages": [QUESTION], "tools": [{"type": "function", "function": function}]}
    server.engine.script = lambda _: [IDS["</think>"]]
    response = post(f"{server.server.url}/v1/chat/completions", json={**body, "tool_choice": "required"})
    assert response.headers["x-tandem-ignored"] == "tools[].function.parameters.properties.at.format"
