"""`POST /v1/chat/completions` over a real socket, in front of a scripted fake engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec import structs

from tandem.protocol.codec import unpack_ids
from tests.fakes.engine import FakeEngine
from tests.fakes.tokenizer import write_tokenizer
from tests.frontend.conftest import RunningServer
from tests.frontend.conftest import post as send
from tests.support.broken_stream import LONG, post_broken_stream
from tests.support.event_stream import events
from tests.support.reasoning_model import RAW, answer_with, encode, with_reasoning, write_reasoning_model
from tests.support.shared_frontend import SharedFrontend, shared_fixtures

TEMPLATE = (
    "<|begin|>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools | length if tools else '' }}"
    "{% if add_generation_prompt %}assistant:{{ opening }}{% endif %}"
)
QUESTION = {"role": "user", "content": "how do I join two paths?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '{"name": "look", "arguments": {"at": "köln"}}'
ARGUMENTS = '{"at": "köln"}'


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reasoning_model(tmp_path_factory.mktemp("model"), TEMPLATE)


shared, engine, server = shared_fixtures(with_reasoning)


def post(server: RunningServer, **fields: Any) -> httpx.Response:
    return send(server.url + "/v1/chat/completions", json={"model": "fake-model", "messages": [QUESTION], **fields})


def deltas(response: httpx.Response) -> list[dict[str, Any]]:
    """Collect the deltas of choice 0, without the first and the last chunk."""
    first, *between, last = [chunk["choices"][0] for chunk in events(response) if chunk["choices"]]
    assert first["delta"] == {"role": "assistant", "content": None, "refusal": None}
    assert last["delta"] == {}
    assert last["finish_reason"]
    assert all(choice["finish_reason"] is None for choice in between)
    return [choice["delta"] for choice in between]


def test_chat_completion_has_every_field_of_the_api(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = answer_with("use os.path.join")
    response = post(server)
    assert response.status_code == 200
    reply = response.json()
    assert reply.pop("id").startswith("chatcmpl-")
    assert reply.pop("created") > 1_700_000_000
    assert reply.pop("system_fingerprint").startswith("tandem-")
    prompt = unpack_ids(engine.submits[0].prompt_ids)
    # The template writes the begin token; the tokenizer, which would, too, adds none.
    assert RAW.decode(prompt, skip_special_tokens=False) == f"<|begin|>user: {QUESTION['content']}\nassistant:"
    said = len(encode("use os.path.join")) + 1
    assert reply == {
        "object": "chat.completion",
        "model": "fake-model",
        "service_tier": "default",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "use os.path.join",
                    "refusal": None,
                    "annotations": [],
                },
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": said,
            "total_tokens": len(prompt) + said,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_chat_stream_chunks_add_up_to_the_whole_message(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = answer_with("use os.path.join")
    response = post(server, stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    assert "".join(delta["content"] for delta in deltas(response)) == "use os.path.join"
    *chunks, last = events(response)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(encode("use os.path.join")) + 1


def test_default_max_tokens_of_a_chat_fits_the_context(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = answer_with("x")
    post(server)
    post(server, max_completion_tokens=7)
    long = {"role": "user", "content": "x" * 1500}
    post(server, messages=[long])
    lengths = [submit.sampling.max_tokens for submit in engine.submits]
    prompts = [len(unpack_ids(submit.prompt_ids)) for submit in engine.submits]
    assert lengths == [2048 - prompts[0], 7, 2048 - prompts[2]]
    error = post(server, messages=[{"role": "user", "content": "x" * 5000}]).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_chat_returns_n_choices(server: RunningServer, stream: bool) -> None:
    response = post(server, n=3, max_tokens=4, stream=stream, seed=1, return_token_ids=True)
    choices = [chunk["choices"][0] for chunk in events(response)] if stream else response.json()["choices"]
    assert {choice["index"] for choice in choices} == {0, 1, 2}
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[-1]["finish_reason"] == "length"
        assert "prompt_token_ids" in own[0]
        assert sum(len(choice.get("token_ids", [])) for choice in own) == 4


@pytest.mark.parametrize("per_step", [1, 3, 100])
def test_tool_call_streams_its_name_before_its_arguments(
    server: RunningServer, engine: FakeEngine, per_step: int
) -> None:
    engine.script = answer_with(f"I look.\n<tool_call>\n{CALL}\n</tool_call>")
    engine.tokens_per_step = per_step
    response = post(server, tools=[TOOL], stream=True)
    found = deltas(response)
    assert "".join(delta["content"] for delta in found if "content" in delta) == "I look."
    start, *rest = [delta["tool_calls"][0] for delta in found if "tool_calls" in delta]
    assert start["id"].startswith("call_")
    assert (start["index"], start["type"]) == (0, "function")
    assert start["function"] == {"name": "look", "arguments": ""}
    assert all(set(call) == {"index", "function"} and call["index"] == 0 for call in rest)
    assert "".join(call["function"]["arguments"] for call in rest) == ARGUMENTS
    assert events(response)[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_tool_call_is_returned_whole(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = answer_with(f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>")
    choice = post(server, tools=[TOOL]).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    first, second = choice["message"]["tool_calls"]
    assert first["id"] != second["id"]
    assert first["function"] == second["function"] == {"name": "look", "arguments": ARGUMENTS}
    single = post(server, tools=[TOOL], parallel_tool_calls=False).json()["choices"][0]
    assert len(single["message"]["tool_calls"]) == 1


def test_tool_call_stays_text_without_usable_tools(server: RunningServer, engine: FakeEngine) -> None:
    text = f"<tool_call>\n{CALL}\n</tool_call>"
    engine.script = answer_with(text)
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        choice = post(server, **fields).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    shown = [RAW.decode(unpack_ids(submit.prompt_ids)) for submit in engine.submits]
    assert shown[0] == shown[1]


def test_required_tool_call_is_constrained_by_a_grammar(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = answer_with(f"<tool_call>\n{CALL}\n</tool_call>")
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        reply = post(server, tools=[TOOL], tool_choice=choice).json()
        assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"
    constraints = [submit.constraint for submit in engine.submits]
    assert all(constraint is not None and "<tool_call>" in constraint for constraint in constraints)
    post(server, tools=[TOOL])
    assert engine.submits[-1].constraint is None


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_truncated_required_call_shows_no_syntax(server: RunningServer, engine: FakeEngine, every: int) -> None:
    ids = encode(f"<tool_call>\n{CALL}\n</tool_call>")
    engine.script, engine.step_seconds = lambda submit: ids[: submit.sampling.max_tokens], 0.0
    seen: list[str | None] = []
    for count in sorted({*range(1, len(ids), every), len(ids) - 1}):
        fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": count}
        choice = post(server, **fields).json()["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"] or "") == ("length", "")
        functions = [call["function"] for call in choice["message"].get("tool_calls", ())]
        response = post(server, **fields, stream=True)
        streamed = [delta["tool_calls"][0]["function"] for delta in deltas(response)]
        assert [part["name"] for part in streamed if "name" in part] == [function["name"] for function in functions]
        arguments = "".join(part["arguments"] for part in streamed)
        assert [arguments] * len(functions) == [function["arguments"] for function in functions]
        assert ARGUMENTS.startswith(arguments.removesuffix("\ufffd"))
        assert events(response)[-1]["choices"][0]["finish_reason"] == "length"
        seen.append(arguments if functions else None)
    assert seen[0] is None
    assert "" in seen
    assert seen[-1] == ARGUMENTS


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_separated_from_content(server: RunningServer, engine: FakeEngine, stream: bool) -> None:
    engine.script = answer_with("<think>\nhow do I\n</think>\n\nuse a path")
    response = post(server, stream=stream)
    if stream:
        found = deltas(response)
        thoughts = "".join(delta.get("reasoning_content", "") for delta in found)
        answer = "".join(delta.get("content", "") for delta in found)
    else:
        reply = response.json()
        message = reply["choices"][0]["message"]
        thoughts, answer = message["reasoning_content"], message["content"]
        expected = len(encode("<think>\nhow do I\n</think>"))
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == expected
    assert (thoughts, answer) == ("how do I", "use a path")


def test_reasoning_opened_by_the_prompt_is_recognized(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = answer_with("how do I</think>use a path")
    message = post(server, chat_template_kwargs={"opening": "<think>\n"}).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("how do I", "use a path")


def test_stop_string_is_included_on_request(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = answer_with("one two three")
    for fields, text in (
        ({"stop": ["two"]}, "one "),
        ({"stop": ["two"], "include_stop_str_in_output": True}, "one two"),
        ({"skip_special_tokens": False}, "one two three"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "one two three<|end|>"),
    ):
        assert post(server, **fields).json()["choices"][0]["message"]["content"] == text


def test_special_tokens_are_included_on_request(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = answer_with("one<|begin|> two")
    assert post(server).json()["choices"][0]["message"]["content"] == "one two"
    shown = post(server, skip_special_tokens=False).json()["choices"][0]["message"]["content"]
    assert shown == "one<|begin|> two"


def test_chat_errors_have_the_openai_format(server: RunningServer, engine: FakeEngine) -> None:
    for fields, status, param in (
        ({"model": "other"}, 404, "model"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0].type"),
        ({"functions": {}}, 400, "functions"),
        ({"guided_json": "nothing"}, 400, "guided_json"),
        ({"chat_template_kwargs": {"messages": 1}}, 400, "chat_template_kwargs.messages"),
        ({"stop_token_ids": [10_000]}, 400, "stop_token_ids"),
        ({"tools": [TOOL], "tool_choice": "always"}, 400, "tool_choice"),
    ):
        response = post(server, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    body = {"model": "fake-model", "messages": [QUESTION], "max_tokens": LONG}
    *chunks, last = events(post_broken_stream(engine, server.url + "/v1/chat/completions", body))
    assert chunks
    assert last["error"]["code"] == "model_failed"


@pytest.fixture
def without_template(shared: SharedFrontend, tmp_path: Path) -> Iterator[RunningServer]:
    write_tokenizer(tmp_path)
    running = RunningServer(structs.replace(shared.config, model_dir=tmp_path)).start().ready()
    yield running
    running.stop()


def test_model_without_a_template_completes_but_cannot_chat(without_template: RunningServer) -> None:
    response = post(without_template)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "no_chat_template")
    assert "--chat-template" in error["message"]
    body = {"model": "fake-model", "prompt": "one", "max_tokens": 2}
    assert send(without_template.url + "/v1/completions", json=body).status_code == 200


def test_openai_client_parses_chat_completions(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = answer_with(f"<think>hm</think>I look.\n<tool_call>\n{CALL}\n</tool_call>")
    create: dict[str, Any] = {"model": "fake-model", "messages": [QUESTION], "tools": [TOOL]}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        whole = client.chat.completions.create(**create)
        calls = whole.choices[0].message.tool_calls
        assert calls is not None
        assert calls[0].type == "function"
        assert calls[0].function.arguments == ARGUMENTS
        assert whole.usage is not None
        assert whole.usage.completion_tokens_details is not None
        with client.chat.completions.stream(**create, stream_options={"include_usage": True}) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert {"chunk", "content.delta", "tool_calls.function.arguments.done"} <= kinds
        assert final.choices[0].message.content == "I look."
        final_calls = final.choices[0].message.tool_calls
        assert final_calls is not None
        assert final_calls[0].function.arguments == ARGUMENTS
        assert final.choices[0].finish_reason == "tool_calls"
        assert final.usage is not None


@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_answered_with_a_function_call(server: RunningServer, engine: FakeEngine, stream: bool) -> None:
    engine.script = answer_with(f"<tool_call>\n{CALL}\n</tool_call>")
    response = post(server, functions=[TOOL["function"]], stream=stream)
    if not stream:
        choice = response.json()["choices"][0]
        assert choice["message"]["function_call"] == {"name": "look", "arguments": ARGUMENTS}
        assert choice["finish_reason"] == "function_call"
        return
    assert events(response)[-1]["choices"][0]["finish_reason"] == "function_call"
    calls = [delta["function_call"] for delta in deltas(response)]
    assert calls[0] == {"name": "look", "arguments": ""}
    assert "".join(call["arguments"] for call in calls) == ARGUMENTS


def test_continuous_usage_is_in_every_chunk(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = answer_with("use os.path.join")
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(post(server, stream=True, stream_options=options))
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counted == sorted(counted)
    assert (counted[0], counted[-1]) == (0, last["usage"]["completion_tokens"])
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}


def test_fields_that_the_template_does_not_read_are_named(server: RunningServer) -> None:
    response = post(server, reasoning_effort="low", enable_thinking=False, max_tokens=3)
    assert response.status_code == 200
    assert response.headers["x-tandem-ignored"] == "reasoning_effort,enable_thinking"


@pytest.fixture
def without_tools(shared: SharedFrontend, tmp_path: Path) -> Iterator[RunningServer]:
    """Run a server whose chat template renders no tools."""
    write_reasoning_model(tmp_path, TEMPLATE.replace("{{ tools | length if tools else '' }}", ""))
    running = RunningServer(structs.replace(shared.config, model_dir=tmp_path)).start().ready()
    yield running
    running.stop()


def test_tools_are_described_where_the_template_renders_none(without_tools: RunningServer, engine: FakeEngine) -> None:
    engine.tokens_per_step = 100
    engine.script = answer_with(f"<tool_call>\n{CALL}\n</tool_call>")
    plain = post(without_tools)
    reply = post(without_tools, tools=[TOOL], tool_choice="required").json()
    assert reply["usage"]["prompt_tokens"] > plain.json()["usage"]["prompt_tokens"]
    prompt = RAW.decode(unpack_ids(engine.submits[-1].prompt_ids))
    assert '{"name":"look","parameters":{"type":"object"}}' in prompt
    assert reply["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": ARGUMENTS}
    tokens = send(without_tools.url + "/tokenize", json={"messages": [QUESTION], "tools": [TOOL]}).json()
    assert tokens["count"] == reply["usage"]["prompt_tokens"]
