"""Stored responses over a real socket through the official client, in front of a scripted fake engine."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec import structs
from openai.types.responses import Response
from prometheus_client import generate_latest

from tandem.frontend.config import FrontendConfig
from tandem.frontend.store.store import StoreLimits
from tandem.protocol.codec import unpack_ids
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import DEADLINE, RunningServer, get, post, until
from tests.support.broken_stream import LONG, slow_down
from tests.support.reasoning_model import RAW, answer_with, with_reasoning, write_reasoning_model

# Tools change its output, so the server does not describe them in a message.
TEMPLATE = (
    "{{ '' if tools else '<|begin|>' }}{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{{ '\\n' }}"
    "{% endfor %}assistant:"
)
KEYS = ("key-a", "key-b")
PATCH: Any = {"type": "custom", "name": "apply_patch"}
CRM: Any = {
    "type": "namespace", "name": "crm", "description": "Customers.",
    "tools": [{"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": False}],
}  # fmt: skip


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendConfig]:
    model = write_reasoning_model(tmp_path_factory.mktemp("model"), TEMPLATE)
    with tempfile.TemporaryDirectory(prefix="tdm-") as folder:
        yield with_reasoning(
            FrontendConfig(
                f"ipc://{folder}/engine", model, beat_timeout=60.0, drain_timeout=1.0, log_level="warning",
                api_keys=KEYS, state_dir=Path(folder), store_limits=StoreLimits(2**20),
            )
        )  # fmt: skip


@pytest.fixture(scope="module")
def running(config: FrontendConfig) -> Iterator[tuple[FakeEngine, RunningServer]]:
    """Start one engine and one server for all tests of this module."""
    fake = FakeEngine(config.endpoint).start()
    server = RunningServer(config).start().ready()
    yield fake, server
    server.stop()
    fake.die()


@pytest.fixture(autouse=True)
def engine(running: tuple[FakeEngine, RunningServer]) -> Iterator[FakeEngine]:
    fake = running[0]
    fake.renew()
    fake.script = answer_with("answer")
    yield fake
    fake.hold, fake.break_after = False, None


@pytest.fixture
def server(running: tuple[FakeEngine, RunningServer]) -> RunningServer:
    return running[1]


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEYS[0], max_retries=0) as opened:
        yield opened


def metrics_of(server: RunningServer) -> str:
    """Return the metrics of a server whose keys have no right to read them."""
    return generate_latest(server.server._service.metrics.registry).decode()


def prompt(engine: FakeEngine) -> str:
    """Return the text of the last prompt."""
    return RAW.decode(unpack_ids(engine.submits[-1].prompt_ids), skip_special_tokens=False).removeprefix("<|begin|>")


def create(client: openai.OpenAI, text: Any = "one?", **fields: Any) -> Response:
    made: Response = client.responses.create(model="fake-model", input=text, **fields)
    return made


def test_a_response_is_retrieved_listed_and_deleted(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = answer_with("<think>hm</think>first")
    made = create(client, instructions="Be short.", metadata={"a": "b"})
    assert made.to_dict()["store"] is True
    found = client.responses.retrieve(made.id)
    assert found.to_dict() == made.to_dict()
    (item,) = client.responses.input_items.list(made.id)
    assert item.to_dict() == {
        "id": item.id, "type": "message", "role": "user", "status": "completed",
        "content": [{"type": "input_text", "text": "one?"}],
    }  # fmt: skip
    client.responses.delete(made.id)
    for again in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match=made.id) as missing:
            again(made.id)
        assert (missing.value.param, missing.value.code) == ("response_id", "response_not_found")
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, previous_response_id=made.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_conversation_continues_without_its_instructions(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = answer_with("<think>hm</think>first")
    first = create(client, instructions="Be short.")
    engine.script = answer_with("second")
    second = create(client, "two?", previous_response_id=first.id)
    assert prompt(engine) == "user: one?\nassistant: hmfirst\nuser: two?\nassistant:"
    assert second.previous_response_id == first.id
    with client.responses.stream(model="fake-model", input="three?", previous_response_id=second.id) as stream:
        third = stream.get_final_response()
    assert prompt(engine).endswith("user: two?\nassistant: second\nuser: three?\nassistant:")
    assert client.responses.retrieve(third.id).output_text == "second"
    client.responses.delete(first.id)
    create(client, "four?", previous_response_id=third.id, store=False)
    assert prompt(engine).startswith("user: one?\nassistant: hmfirst\nuser: two?")


def test_input_items_are_listed_in_pages(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = answer_with("first")
    first = create(client)
    items: Any = [
        {"id": f"msg_{n}", "role": "user", "content": [{"type": "input_text", "text": "x"}]} for n in range(4)
    ]
    second = create(client, items, previous_response_id=first.id)
    newest = [item.id for item in client.responses.input_items.list(second.id)]
    assert newest[:4] == ["msg_3", "msg_2", "msg_1", "msg_0"]
    assert newest[4] == first.output[0].id
    assert len(newest) == 6
    page = client.responses.input_items.list(second.id, order="asc", limit=2, after=newest[4])
    assert [item.id for item in page.data] == ["msg_0", "msg_1"]
    assert page.has_more
    assert [item.id for item in page][2:] == ["msg_2", "msg_3"]
    for query in ({"limit": 0}, {"limit": 101}, {"after": "msg_9"}):
        with pytest.raises(openai.BadRequestError):
            client.responses.input_items.list(second.id, **query)


def test_items_are_referred_to_by_their_id(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = answer_with("<think>hm</think>first")
    made = create(client, [{"id": "msg_mine", "role": "user", "content": "one?"}])
    thoughts, message = made.output
    given: Any = [
        {"type": "item_reference", "id": "msg_mine"}, {"type": "item_reference", "id": thoughts.id},
        {"id": message.id}, {"role": "user", "content": "two?"},
    ]  # fmt: skip
    create(client, given)
    assert prompt(engine) == "user: one?\nassistant: hmfirst\nuser: two?\nassistant:"
    create(client, [given[0], given[3]], previous_response_id=made.id)
    assert prompt(engine) == "user: one?\nassistant: hmfirst\nuser: two?\nassistant:"
    with pytest.raises(openai.NotFoundError, match="msg_none") as caught:
        create(client, [given[0], {"type": "item_reference", "id": "msg_none"}])
    assert caught.value.param == "input[1].id"


def test_a_client_carries_reasoning_without_the_store(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = answer_with("<think>hm köln</think>first")
    made = create(client, store=False, include=["reasoning.encrypted_content"])
    thoughts, message = [item.to_dict() for item in made.output]
    carried: Any = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "encrypted_content": thoughts["encrypted_content"],
    }
    create(client, [{"role": "user", "content": "one?"}, carried, message], store=False)
    assert prompt(engine) == "user: one?\nassistant: hm kölnfirst\nassistant:"
    for foreign in ("gAAAAA", "tandem-reasoning-1:?", "tandem-reasoning-1:/w=="):
        create(client, [{"role": "user", "content": "one?"}, {**carried, "encrypted_content": foreign}, message])
        assert prompt(engine) == "user: one?\nassistant: first\nassistant:"
    assert "encrypted_content" not in create(client).output[0].to_dict()


def test_objects_of_another_key_do_not_exist(client: openai.OpenAI, server: RunningServer) -> None:
    made = create(client)
    headers = {"authorization": f"Bearer {KEYS[1]}"}
    url = f"{server.url}/v1/responses/{made.id}"
    for path in (url, url + "/input_items"):
        refused = get(path, headers=headers)
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")
    assert httpx.delete(url, headers=headers, timeout=DEADLINE).status_code == 404
    other = client.with_options(api_key=KEYS[1])
    with pytest.raises(openai.BadRequestError, match=made.id) as missing:
        create(other, previous_response_id=made.id)
    assert missing.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        create(other, [{"type": "item_reference", "id": made.output[0].id}])
    assert client.responses.retrieve(made.id).id == made.id


def test_a_response_that_need_not_be_stored_is_not(client: openai.OpenAI) -> None:
    made = create(client, store=False)
    assert made.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_synchronous_response_cannot_be_cancelled(client: openai.OpenAI) -> None:
    made = create(client)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.retrieve(made.id, stream=True)


def test_a_response_that_failed_is_stored_as_failed(client: openai.OpenAI, engine: FakeEngine) -> None:
    slow_down(engine)
    engine.script = answer_with("one two three four five " * LONG)
    stream = client.responses.create(model="fake-model", input="x", stream=True)
    next(stream)
    engine.break_after = 1
    failed: Any = list(stream)[-1]
    assert (failed.type, failed.response.to_dict()["store"]) == ("response.failed", True)
    found = client.responses.retrieve(failed.response.id)
    assert (found.status, found.to_dict()) == ("failed", failed.response.to_dict())


def test_a_full_store_lets_the_generation_go_on(client: openai.OpenAI, server: RunningServer) -> None:
    service_store: Any = server.server._service.store
    service_store._store._limits, limits = StoreLimits(1), service_store._store._limits
    made = create(client)
    assert (made.output_text, made.to_dict()["store"]) == ("answer", False)
    last: Any = list(client.responses.create(model="fake-model", input="x", stream=True))[-1]
    assert (last.type, last.response.to_dict()["store"]) == ("response.completed", False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    text = metrics_of(server)
    assert 'tandem_store_failures_total{operation="save"} 2.0' in text
    service_store._store._limits = limits
    assert create(client).to_dict()["store"] is True


def test_a_server_without_a_store_says_so(config: FrontendConfig) -> None:
    running = RunningServer(structs.replace(config, store=False, api_keys=())).start().ready()
    body = {"model": "fake-model", "input": "x", "store": True}
    made = post(running.url + "/v1/responses", json=body).json()
    assert made["store"] is False
    refused = post(running.url + "/v1/responses", json={**body, "previous_response_id": made["id"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")
    assert "--store off" in refused.json()["error"]["message"]
    assert get(running.url + "/v1/responses/" + made["id"]).status_code == 404
    running.stop()


def test_a_custom_tool_call_and_its_result_round_trip(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = answer_with("I patch.\n" + call("apply_patch", '{"input": "*** \\"k\\u00f6ln\\"\\n"}'))
    made = create(client, tools=[PATCH])
    said, patch = made.output
    assert patch.to_dict() == {
        "id": patch.id, "type": "custom_tool_call", "status": "completed", "name": "apply_patch",
        "call_id": patch.to_dict()["call_id"], "input": '*** "köln"\n',
    }  # fmt: skip
    engine.tokens_per_step = 3
    with client.responses.stream(model="fake-model", input="one?", tools=[PATCH]) as stream:
        events = list(stream)
        final: Any = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == final.output[1].input == '*** "köln"\n'
    assert len(deltas) > 1
    result: Any = {"type": "custom_tool_call_output", "call_id": patch.to_dict()["call_id"], "output": "done"}
    create(client, [result], tools=[PATCH], previous_response_id=made.id)
    shown = 'assistant: I patch.apply_patch({"input": "*** \\"köln\\"\\n"})\ntool: done\nassistant:'
    assert prompt(engine).endswith(shown)
    items: Any = [{"role": "user", "content": "one?"}, said, patch, result]
    create(client, items, tools=[PATCH], store=False)
    assert prompt(engine).endswith(shown)


def test_a_call_in_a_namespace_carries_it_back(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = answer_with(call("crm__find", '{"id": 7}'))
    made = create(client, tools=[CRM])
    (found,) = made.output
    assert found.type == "function_call"
    assert (found.name, found.namespace, found.arguments) == ("find", "crm", '{"id": 7}')
    result: Any = {"type": "function_call_output", "call_id": found.call_id, "output": "Ann"}
    create(client, [{"role": "user", "content": "who?"}, found, result], tools=[CRM])
    assert prompt(engine) == 'user: who?\nassistant: crm__find({"id": 7})\ntool: Ann\nassistant:'
    chosen: Any = {"type": "function", "name": "find", "namespace": "crm"}
    engine.script = answer_with(call("crm__find", "{}"))
    assert create(client, tools=[CRM], tool_choice=chosen).output[0].to_dict()["namespace"] == "crm"


def test_tools_and_items_of_other_servers_are_dropped_and_named(
    client: openai.OpenAI, engine: FakeEngine, server: RunningServer
) -> None:
    engine.script = answer_with("answer")
    items: Any = [
        {"role": "user", "content": "one?"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "local_shell_call", "id": "ls_1", "call_id": "c1", "status": "completed",
         "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "c1", "output": "a.txt"},
        {"type": "shell_call", "call_id": "c2", "action": {"commands": ["pwd"]}},
        {"type": "shell_call_output", "call_id": "c2",
         "output": [{"stdout": "/tmp\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]},
        {"type": "apply_patch_call", "call_id": "c3", "status": "completed",
         "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "c3", "status": "completed"},
    ]  # fmt: skip
    raw = client.responses.with_raw_response.create(
        model="fake-model", input=items, tools=[{"type": "web_search"}], truncation="auto", text={"verbosity": "low"},
        reasoning={"summary": "detailed"},
    )  # fmt: skip
    named = raw.headers["x-tandem-ignored"].split(",")
    assert sorted(named) == [
        "input[].web_search_call", "reasoning.summary", "text.verbosity", "tools[].web_search", "truncation",
    ]  # fmt: skip
    assert raw.parse().tools == []
    metrics = metrics_of(server)
    assert 'tandem_ignored_fields_total{field="tools[].web_search"}' in metrics
    assert prompt(engine) == (
        'user: one?\nassistant: local_shell({"type": "exec", "command": ["ls"], "env": {}})\ntool: a.txt\n'
        'assistant: shell({"commands": ["pwd"]})\ntool: /tmp\n{"type":"exit","exit_code":0}\n'
        'assistant: apply_patch({"type": "delete_file", "path": "a"})\ntool: completed\nassistant:'
    )
    stored = client.responses.input_items.list(raw.parse().id, order="asc")
    assert [item.type for item in stored] == [item.get("type", "message") for item in items if item != items[1]]
    with pytest.raises(openai.BadRequestError, match="web_search_preview"):
        create(client, tools=[{"type": "web_search_preview"}], tool_choice={"type": "web_search_preview"})


@pytest.mark.parametrize("text", ["answer", "<think>hm</think>answer", "answer\n" + call("crm__find", "{}")])
def test_log_probabilities_are_those_of_the_message(client: openai.OpenAI, engine: FakeEngine, text: str) -> None:
    engine.script = answer_with(text)
    for fields in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        made: Any = create(client, tools=[CRM], **fields)
        (message,) = [item for item in made.output if item.type == "message"]
        tokens = message.content[0].logprobs
        assert "".join([token.token for token in tokens]).strip() == "answer"
        assert {len(token.top_logprobs) for token in tokens} == {fields.get("top_logprobs", 0)}
        with client.responses.stream(model="fake-model", input="one?", tools=[CRM], **fields) as stream:
            streamed: Any = stream.get_final_response()
        (other,) = [item for item in streamed.output if item.type == "message"]
        assert [token.to_dict() for token in other.content[0].logprobs] == [token.to_dict() for token in tokens]


def test_a_client_that_goes_away_leaves_nothing_in_the_store(server: RunningServer, engine: FakeEngine) -> None:
    engine.hold = True
    before = len(engine.aborts)
    body = {"model": "fake-model", "input": "nobody waits", "stream": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            server.url + "/v1/responses", json=body, headers={"authorization": f"Bearer {KEYS[0]}"},
            timeout=httpx.Timeout(30.0, read=0.2),
        )  # fmt: skip
    until(lambda: len(engine.aborts) > before, "the engine hears of it")
    service_store: Any = server.server._service.store
    count = "SELECT count(*) FROM items WHERE body LIKE '%nobody waits%'"
    assert service_store._store._connection.execute(count).fetchone()[0] == 0


def test_stored_input_has_the_id_and_status_that_the_api_requires(client: openai.OpenAI) -> None:
    given: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "message", "id": "msg_1", "role": "user", "status": "incomplete", "content": []},
    ]
    made = client.responses.create(model="fake-model", input=given)
    stored: list[Any] = client.responses.input_items.list(made.id, order="asc").data
    assert [item.status for item in stored] == ["completed", "completed", "completed", "incomplete"]
    assert all(item.id for item in stored)
    assert (stored[1].id, stored[3].id) == ("fc_1", "msg_1")
