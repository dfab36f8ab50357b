"""`POST /v1/messages` over a real socket with Anthropic's client, in front of a scripted fake engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pydantic
import pytest
from msgspec import structs

from tandem.frontend.api.messages.request import parse_message_request
from tandem.frontend.chat.chat_template import ChatTemplate
from tandem.frontend.config import FrontendConfig
from tandem.frontend.metrics.exposition import Exposition
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.protocol.codec import unpack_ids
from tandem.protocol.errors import ErrorCode
from tandem.protocol.model_folder import TemplateSource
from tests.fakes.engine import FakeEngine, repeat_prompt
from tests.frontend.conftest import RunningServer, get, until
from tests.frontend.conftest import post as send
from tests.support.reasoning_model import RAW, answer_with, with_reasoning, write_reasoning_model
from tests.support.rendering import rendered
from tests.support.scrape import value
from tests.support.shared_frontend import shared_fixtures

# Its 3,000 modules take seconds to load, in every process of tests: only a test that needs it loads it.
if TYPE_CHECKING:
    from anthropic import Anthropic
    from anthropic.types import Message

TEMPLATE = (
    "<|begin|>{% for m in messages %}{{ m.role }}: {{ m.reasoning_content or '' }}|{{ m.content }}"
    "{% for c in m.tool_calls or () %} call {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %};"
    "{% endfor %}{{ tools | length if tools else '' }}{{ 'calm' if enable_thinking is false else '' }}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
QUESTION: dict[str, Any] = {"role": "user", "content": "how do I join two paths?"}
LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Look.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "köln"}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"
BODY = {"model": "fake-model", "max_tokens": 8, "messages": [QUESTION]}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reasoning_model(tmp_path_factory.mktemp("model"), TEMPLATE)


def configured(config: FrontendConfig) -> FrontendConfig:
    return structs.replace(with_reasoning(config), api_keys=("key-one",), max_body=100_000)


shared, engine, server = shared_fixtures(configured)


@pytest.fixture
def client(server: RunningServer, engine: FakeEngine) -> "Iterator[Anthropic]":
    from anthropic import Anthropic

    engine.script = answer_with("fine")
    with Anthropic(base_url=server.url, api_key="key-one", max_retries=0) as made:
        yield made


def ask(client: "Anthropic", **fields: Any) -> "Message":
    message: Message = client.messages.create(**{**BODY, "max_tokens": 400, **fields})
    return message


def prompt_of(engine: FakeEngine) -> str:
    text: str = RAW.decode(list(unpack_ids(engine.submits[-1].prompt_ids)), skip_special_tokens=False)
    return text


def post(server: RunningServer, path: str = "/v1/messages", **more: Any) -> httpx.Response:
    return send(server.url + path, **{"json": BODY, "headers": {"x-api-key": "key-one"}, **more})


def test_a_message_has_its_blocks_and_its_usage(client: "Anthropic", engine: FakeEngine) -> None:
    from anthropic.types import TextBlock, ThinkingBlock

    engine.script = answer_with(f"{THOUGHT}os.path.join")
    engine.cached = lambda _: 16
    message = ask(client)
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake-model")
    thinking, text = message.content
    assert isinstance(thinking, ThinkingBlock) and isinstance(text, TextBlock)
    assert (thinking.thinking, bool(thinking.signature), text.text) == ("hm", True, "os.path.join")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (16, 0)
    counted = client.messages.count_tokens(model="fake-model", messages=[QUESTION])
    assert usage.input_tokens + 16 == counted.input_tokens == len(engine.submits[-1].prompt_ids) // 4


def test_a_stream_counts_cached_tokens_from_its_first_event_on(client: "Anthropic", engine: FakeEngine) -> None:
    engine.script = answer_with("os.path.join")
    engine.cached = lambda _: 16
    with client.messages.stream(**BODY) as stream:
        first = next(iter(stream))
        final = stream.get_final_message()
    assert first.type == "message_start"
    counted = len(engine.submits[-1].prompt_ids) // 4
    for usage in (first.message.usage, final.usage):
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (counted - 16, 16)
    assert final.usage.output_tokens > 0


def test_a_stream_accumulates_to_the_whole_message(client: "Anthropic", engine: FakeEngine) -> None:
    engine.script = answer_with(f"{THOUGHT}I look.\n{CALL}")
    fields: dict[str, Any] = {**BODY, "max_tokens": 400, "tools": [LOOK]}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)

    def plain(message: "Message") -> dict[str, Any]:
        shown = message.to_dict(exclude_none=True) | {"id": None}
        return {**shown, "content": [{**block, "id": None} for block in shown["content"]]}

    assert plain(final) == plain(whole)
    assert whole.stop_reason == "tool_use"


def test_a_tool_call_and_its_result_round_trip(client: "Anthropic", engine: FakeEngine) -> None:
    from anthropic.types import TextBlock, ToolUseBlock

    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "look"}):
        engine.script = answer_with(f"{THOUGHT}{CALL}")
        first = ask(client, tools=[LOOK], tool_choice=choice)
        (call,) = [block for block in first.content if isinstance(block, ToolUseBlock)]
        assert (call.name, call.input, first.stop_reason) == ("look", {"at": "köln"}, "tool_use")
        assert (engine.submits[-1].constraint is None) == (choice["type"] == "auto")
    engine.script = answer_with("It rains.")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain", "is_error": True}
    answer = {"role": "assistant", "content": first.content}
    second = ask(client, tools=[LOOK], messages=[QUESTION, answer, {"role": "user", "content": [result]}])
    (text,) = second.content
    assert isinstance(text, TextBlock) and text.text == "It rains."
    assert prompt_of(engine) == (
        '<|begin|>user: |how do I join two paths?;assistant: hm| call look {"at": "köln"};'
        "tool: |Error: rain;1assistant:"
    )


def test_system_tools_and_thinking_are_rendered_and_counted(client: "Anthropic", engine: FakeEngine) -> None:
    fields: dict[str, Any] = {"system": "Be short.", "tools": [LOOK], "thinking": {"type": "disabled"}}
    message = ask(client, **fields)
    assert prompt_of(engine) == "<|begin|>system: |Be short.;user: |how do I join two paths?;1calmassistant:"
    counted = client.messages.count_tokens(model="fake-model", messages=[QUESTION], **fields)
    assert counted.input_tokens == message.usage.input_tokens


def test_what_the_model_does_not_serve_is_named_in_a_header(client: "Anthropic") -> None:
    raw = client.messages.with_raw_response.create(
        **BODY,
        thinking={"type": "enabled", "budget_tokens": 2048},
        output_config={"effort": "high"},
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
        extra_body={"surprise": 1},
    )
    names = raw.headers["x-tandem-ignored"].split(",")
    assert sorted(names) == [
        "output_config.effort", "surprise", "thinking.budget_tokens", "tools[].web_search_20250305",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "text", "ignored"),
    [
        ("x", "x", ("output_config.effort", "thinking")),
        ("{{ enable_thinking }}", "True", ("output_config.effort",)),
        ("{{ thinking }}", "True", ("output_config.effort",)),
        ("{{ enable_thinking }} {{ reasoning_effort }}", "True high", ()),
        ("{{ reasoning_effort }}", "high", ("thinking",)),
    ],
)
def test_settings_of_reasoning_reach_a_template_that_reads_them(
    template: str, text: str, ignored: tuple[str, ...]
) -> None:
    body = {**BODY, "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}
    conversation = parse_message_request(json.dumps(body).encode(), IgnoredFields()).prompt.conversation
    recorded = IgnoredFields()
    assert rendered(ChatTemplate(TemplateSource({"default": template}, "a test"), {}), conversation, recorded) == text
    assert recorded.paths == ignored


def test_effort_alone_leaves_reasoning_to_the_template() -> None:
    body = {**BODY, "output_config": {"effort": "high"}}
    conversation = parse_message_request(json.dumps(body).encode(), IgnoredFields()).prompt.conversation
    recorded, source = IgnoredFields(), TemplateSource({"default": "{{ enable_thinking is defined }}"}, "a test")
    assert rendered(ChatTemplate(source, {}), conversation, recorded) == "False"
    assert recorded.paths == ("output_config.effort",)


def test_a_begun_answer_is_continued(client: "Anthropic", engine: FakeEngine) -> None:
    ask(client, messages=[QUESTION, {"role": "assistant", "content": "The answer is ("}])
    assert prompt_of(engine) == "<|begin|>user: |how do I join two paths?;assistant: |The answer is ("


def test_a_message_tells_the_stop_sequence_that_ended_it(client: "Anthropic", engine: FakeEngine) -> None:
    engine.script = answer_with("one two three four")
    message = ask(client, stop_sequences=["four", " three"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " three")
    assert message.content[0].to_dict()["text"] == "one two"
    with client.messages.stream(**{**BODY, "max_tokens": 400, "stop_sequences": [" three"]}) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", " three")


def test_max_tokens_beyond_the_context_are_lowered_to_it(client: "Anthropic", engine: FakeEngine) -> None:
    engine.script, engine.tokens_per_step = repeat_prompt, 256
    assert ask(client, max_tokens=8).stop_reason == "max_tokens"
    message = ask(client, max_tokens=20_000)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.input_tokens + message.usage.output_tokens == engine.facts.max_len


def test_a_schema_constrains_the_output(client: "Anthropic", engine: FakeEngine) -> None:
    class Place(pydantic.BaseModel):
        name: str

    engine.script = answer_with('{"name": "Köln"}')
    parsed = client.messages.parse(model="fake-model", max_tokens=400, messages=[QUESTION], output_format=Place)
    assert parsed.parsed_output == Place(name="Köln")
    assert '"name"' in (engine.submits[-1].constraint or "")


def test_models_are_listed_in_the_shape_of_the_client(client: "Anthropic") -> None:
    import anthropic

    (model,) = client.models.list()
    assert (model.id, model.display_name, model.type) == ("fake-model", "fake-model", "model")
    assert (model.created_at.year, model.max_input_tokens) == (2023, 2048)
    assert client.models.retrieve("fake-model") == model
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")


def test_errors_raise_the_clients_exceptions(client: "Anthropic", engine: FakeEngine, server: RunningServer) -> None:
    import anthropic

    image = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}]
    for kind, error_type, fields in (
        (anthropic.BadRequestError, "invalid_request_error", {"max_tokens": 0}),
        (anthropic.BadRequestError, "invalid_request_error", {"messages": [{"role": "user", "content": image}]}),
        (anthropic.BadRequestError, "invalid_request_error", {"messages": [{**QUESTION, "content": "one " * 9000}]}),
        (anthropic.NotFoundError, "not_found_error", {"model": "other"}),
        (anthropic.RequestTooLargeError, "request_too_large", {"system": "x" * 200_000}),
    ):
        with pytest.raises(kind) as caught:
            ask(client, **fields)
        assert caught.value.type == error_type
        assert caught.value.request_id == caught.value.body["request_id"] != ""  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d{4,} tokens > 2047 maximum"):
        ask(client, messages=[{**QUESTION, "content": "one " * 9000}])
    for code, kind in (
        (ErrorCode.OVERLOADED, anthropic.OverloadedError),
        (ErrorCode.MODEL_FAILED, anthropic.InternalServerError),
    ):
        engine.refusal = code
        with pytest.raises(kind):
            ask(client)
    wrong = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
        ask(wrong)


@pytest.mark.parametrize(
    ("code", "reason", "retry_after"),
    [
        (ErrorCode.OVERLOADED, "engine_overloaded", None),
        (ErrorCode.ENGINE_PAUSED, "unavailable", "5"),
        (ErrorCode.ENGINE_UNAVAILABLE, "unavailable", None),
    ],
)
def test_a_529_is_counted_by_its_code(
    server: RunningServer, engine: FakeEngine, code: ErrorCode, reason: str, retry_after: str | None
) -> None:
    def count() -> float:
        refused = Exposition([server.server._service.metrics.registry], lambda: "m").text()
        return value(refused, f'tandem_refused_requests_total{{reason="{reason}"}}')

    before = count()
    engine.refusal = code
    answer = post(server)
    assert answer.status_code == 529
    assert int(answer.headers["retry-after"]) >= 1
    if retry_after is not None:
        assert answer.headers["retry-after"] == retry_after
    until(lambda: count() == before + 1, "the refusal in the metrics")


def test_an_error_within_a_stream_raises_the_clients_exception(client: "Anthropic", engine: FakeEngine) -> None:
    import anthropic

    engine.break_after = 3
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        client.messages.stream(**BODY) as stream,
    ):
        stream.until_done()
    assert caught.value.type == "api_error"


def test_every_error_has_the_shape_of_its_api(server: RunningServer) -> None:
    key, version = {"x-api-key": "key-one"}, {"anthropic-version": "2023-06-01"}
    for path, headers, content, status, kind in (
        ("/v1/messages", key, b"{", 400, "invalid_request_error"),
        ("/v1/messages", key, b"[]", 400, "invalid_request_error"),
        ("/v1/messages/count_tokens", key, b"", 400, "invalid_request_error"),
        ("/v1/messages", {**key, "content-type": "text/plain"}, b"{}", 400, "invalid_request_error"),
        ("/v1/messages", key, b" " * 200_000, 413, "request_too_large"),
        ("/v1/messages/batches", key, b"{}", 404, "not_found_error"),
        ("/v1/messages", key, json.dumps({**BODY, "model": "other"}).encode(), 404, "not_found_error"),
        ("/v1/messages/count_tokens", key, json.dumps({**BODY, "model": "x"}).encode(), 404, "not_found_error"),
        ("/v1/messages", {"x-api-key": "other"}, b"{}", 401, "authentication_error"),
        ("/v1/messages", {}, b"{}", 401, "authentication_error"),
        ("/v1/nowhere", version, b"{}", 401, "authentication_error"),
        ("/v1/nowhere", {**key, **version}, b"{}", 404, "not_found_error"),
    ):
        response = send(server.url + path, content=content, headers=headers)
        body = response.json()
        assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert body["error"]["message"]
        assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]


def test_keys_and_headers_of_both_kinds_are_accepted(server: RunningServer) -> None:
    for headers in (
        {"x-api-key": "key-one"},
        {"authorization": "Bearer key-one"},
        {"x-api-key": "key-one", "authorization": "Bearer other"},
        {"x-api-key": "key-one", "anthropic-version": "2023-06-01", "anthropic-beta": "a-2025-01-01,b"},
    ):
        response = post(server, "/v1/messages?beta=true", headers=headers)
        assert (response.status_code, response.json()["type"]) == (200, "message")
    # Two keys in one request are none, and OpenAI's routes take only their own header.
    twice = [("x-api-key", "key-one"), ("x-api-key", "key-one")]
    assert post(server, headers=twice).status_code == 401
    assert post(server, "/v1/chat/completions").status_code == 401
    wrong_method = get(server.url + "/v1/messages", headers={"x-api-key": "key-one"})
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
    assert wrong_method.json()["error"]["type"] == "invalid_request_error"


def test_events_of_a_message_are_named_and_end_with_its_stop(server: RunningServer) -> None:
    response = post(server, json={**BODY, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = response.text.split("\n\n")
    names = [block.split("\n")[0].removeprefix("event: ") for block in blocks]
    assert (names[0], names[-1], rest) == ("message_start", "message_stop", "")
    assert all(json.loads(block.split("data: ")[1])["type"] == name for block, name in zip(blocks, names, strict=True))
