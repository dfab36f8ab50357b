"""What was stored costs no more memory, time or other keys' data than a request that sends it; at a small size."""

import contextlib
import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from tandem.frontend.access.api_key import unnamed_key
from tandem.frontend.api.byte_budget import MAX_INLINE_BODY
from tandem.frontend.api.responses import input_items
from tandem.frontend.api.responses.context import MAX_REFERENCES
from tandem.frontend.api.service import Service
from tandem.frontend.config import FrontendConfig
from tandem.frontend.store.store import StoreLimits
from tandem.protocol.codec import unpack_ids
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import DEADLINE, RunningServer, until
from tests.support.reasoning_model import RAW, answer_with, with_reasoning, write_reasoning_model

# It names `tools`, so the server leaves the rendering of tools and results to it.
TEMPLATE = (
    "{{ '<|begin|>' if tools else '' }}<|begin|>"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}{{ '\\n' }}{% endfor %}assistant:"
)
KEYS = ("key-a", "key-b")
MAX_BODY = 2**20
LARGE = 400_000
"""Characters of an item of which two fit into a body, and three do not."""
ITEM = {"type": "function_call_output", "id": "fco_1", "call_id": "c", "output": "x", "caller": "y" * LARGE}
"""A large item that is short in the prompt."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeEngine, RunningServer]]:
    model = write_reasoning_model(tmp_path_factory.mktemp("model"), TEMPLATE)
    with tempfile.TemporaryDirectory(prefix="tdm-") as folder:
        config = with_reasoning(
            FrontendConfig(
                f"ipc://{folder}/engine", model, beat_timeout=60.0, drain_timeout=1.0, log_level="error",
                api_keys=KEYS, state_dir=Path(folder), store_limits=StoreLimits(8 * 2**20), max_body=MAX_BODY,
            )
        )  # fmt: skip
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


@pytest.fixture(autouse=True)
def service(server: RunningServer) -> Iterator[Service]:
    service = server.server._service
    yield service
    until(lambda: service.stored_budget.used == 0, "the memory of answers and inputs is returned")
    assert (service.body_budget.used, service.stored_budget.used_by) == (0, {})


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=DEADLINE) as opened:
        yield opened


def create(client: httpx.Client, given: Any, **fields: Any) -> httpx.Response:
    return client.post("/v1/responses", json={"model": "fake-model", "input": given, **fields})


def stored(client: httpx.Client, given: Any, **fields: Any) -> str:
    made = create(client, given, **fields)
    assert (made.status_code, made.json()["store"]) == (200, True), made.text[:500]
    name: str = made.json()["id"]
    return name


def item(name: str, size: int = LARGE) -> dict[str, Any]:
    return {**ITEM, "id": name, "caller": "y" * size}


def reference(name: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": name}


def listed(client: httpx.Client, name: str, **query: Any) -> httpx.Response:
    return client.get(f"/v1/responses/{name}/input_items", params=query)


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_an_item_referred_to_many_times_is_read_once(client: httpx.Client, engine: FakeEngine) -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "z" * LARGE}]}
    stored(client, [{**thought, "id": "rs_1"}, item("fco_once", 10)])
    for name, shown in (("rs_1", ""), ("fco_once", "tool: x\n")):
        made = create(client, [reference(name)] * 120 + [{"role": "user", "content": "go"}], max_output_tokens=5)
        assert made.status_code == 200, made.text
        prompt = RAW.decode(unpack_ids(engine.submits[-1].prompt_ids), skip_special_tokens=False)
        assert prompt == f"<|begin|>{shown}user: go\nassistant:"
        assert len(listed(client, made.json()["id"]).json()["data"]) == 2


def test_references_beyond_a_body_are_refused_before_they_are_read(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fco_a", "fco_b", "fco_c"):
        stored(client, [item(name)])
    read: list[int] = []
    monkeypatch.setattr(input_items, "_item", lambda *given: read.append(1) or _ITEM(*given))
    assert create(client, [reference("fco_a"), reference("fco_b")], store=False).status_code == 200
    read.clear()
    refused = create(client, [reference(name) for name in ("fco_a", "fco_b", "fco_c")] * 40)
    assert refusal(refused) == (400, "invalid_value")
    assert refused.json()["error"]["param"] == "input"
    assert str(3 * LARGE)[:2] in refused.json()["error"]["message"]
    assert len(read) == 120, "the references themselves"
    padded = [reference("fco_a"), reference("fco_b"), item("fco_own", LARGE)]
    assert refusal(create(client, padded)) == (400, "invalid_value"), "with what the request sends itself"


_ITEM = input_items._item


def test_references_count_with_the_conversation(client: httpx.Client) -> None:
    stored(client, [item("fco_d")])
    stored(client, [item("fco_e")])
    first = stored(client, [item("fco_f")])
    assert create(client, [reference("fco_d")], previous_response_id=first, store=False).status_code == 200
    mixed = create(client, [reference("fco_d"), reference("fco_e")], previous_response_id=first)
    assert refusal(mixed) == (400, "invalid_value")
    known = create(client, [reference("fco_f")] * 120, previous_response_id=first, store=False)
    assert known.status_code == 200, "what the conversation has is not read again"


def test_conversation_counts_with_the_request(client: httpx.Client) -> None:
    first = stored(client, [item("fco_g")])
    second = stored(client, [item("fco_h")], previous_response_id=first)
    refused = create(client, [item("fco_i")], previous_response_id=second)
    assert (*refusal(refused), refused.json()["error"]["param"]) == (400, "invalid_value", "previous_response_id")
    counted = client.post("/v1/responses/input_tokens", json={
        "model": "fake-model", "input": [item("fco_i")], "previous_response_id": second})  # fmt: skip
    assert refusal(counted) == (400, "invalid_value")
    assert create(client, "short", previous_response_id=second).status_code == 200


def test_references_are_limited_in_number(client: httpx.Client) -> None:
    many = create(client, [reference(f"none_{n}") for n in range(MAX_REFERENCES + 1)])
    assert (*refusal(many), many.json()["error"]["param"]) == (400, "invalid_value", "input")
    missing = create(client, [reference(f"none_{n}") for n in range(MAX_REFERENCES)])
    assert (*refusal(missing), missing.json()["error"]["param"]) == (404, "item_not_found", "input[0].id")


def test_stored_items_have_no_more_parts_than_a_request(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_items, "MAX_PARTS", 300)
    parts = [{"type": "input_text", "text": "x"}] * 100
    for name in ("msg_a", "msg_b", "msg_c"):
        stored(client, [{"type": "message", "role": "user", "id": name, "content": parts}])
    assert create(client, [reference("msg_a"), reference("msg_b")], store=False).status_code == 200
    refused = create(client, [reference(name) for name in ("msg_a", "msg_b", "msg_c")])
    assert refusal(refused) == (400, "invalid_value")
    first = stored(client, [reference("msg_a"), reference("msg_b")])
    assert refusal(create(client, [reference("msg_c")], previous_response_id=first)) == (400, "invalid_value")


def test_ids_of_items_are_bounded(client: httpx.Client) -> None:
    message = {"role": "user", "content": "x"}
    assert create(client, [{**message, "id": "m" * input_items.MAX_ITEM_ID}]).status_code == 200
    for given in ({**message, "id": "m" * 2000}, reference("m" * 2000)):
        refused = create(client, [message, given])
        assert (*refusal(refused), refused.json()["error"]["param"]) == (400, "invalid_value", "input[1].id")


def test_large_stored_items_are_parsed_outside_the_event_loop(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return _ITEM(*given)

    first = stored(client, [item("fco_j")])
    monkeypatch.setattr(input_items, "_item", noted)
    for given, fields in (([reference("fco_j")], {}), ("x", {"previous_response_id": first})):
        threads.clear()
        assert create(client, given, store=False, **fields).status_code == 200
        assert threads[-1].startswith("parse")


def test_foreign_encrypted_content_is_not_stored(client: httpx.Client) -> None:
    own = create(client, "x", include=["reasoning.encrypted_content"])
    assert own.status_code == 200
    given = [
        {"type": "reasoning", "id": "rs_f", "summary": [{"type": "summary_text", "text": "s"}],
         "encrypted_content": "g" * LARGE},
        {"type": "reasoning", "summary": [], "encrypted_content": "tandem-reasoning-1:?" + "g" * LARGE},
        {"type": "reasoning", "id": "rs_own", "summary": [], "encrypted_content": "tandem-reasoning-1:aG0="},
        {"role": "user", "content": "go"},
    ]  # fmt: skip
    name = stored(client, given)
    page = listed(client, name, order="asc").json()["data"]
    assert page[0].keys() == page[1].keys() == {"type", "id", "status", "summary"}
    assert (page[0]["id"], page[0]["summary"]) == ("rs_f", [{"type": "summary_text", "text": "s"}])
    assert page[1]["id"].startswith("rs_")
    assert page[2] == {**given[2], "status": "completed"}


@pytest.mark.parametrize("continued", [False, True])
def test_a_page_of_items_has_no_more_bytes_than_a_body(client: httpx.Client, continued: bool) -> None:
    """Both of a first response and of one that continues another."""
    first = stored(client, [item("fco_k"), item("fco_l")])
    name = stored(client, [item("fco_m", 10)], previous_response_id=first) if continued else first
    found: list[str] = []
    after = None
    for _ in range(10):
        answer = listed(client, name, limit=100, order="asc", **({"after": after} if after else {}))
        assert answer.status_code == 200
        assert len(answer.content) <= MAX_BODY + 1000
        page = answer.json()
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        found += [one["id"] for one in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert [one for one in found if one.startswith("fco")] == ["fco_k", "fco_l", *(["fco_m"] if continued else [])]


def test_pages_end_before_the_body_limit(client: httpx.Client, service: Service) -> None:
    """The store may hold more than a body, of a time when the limit was higher."""
    name = stored(client, [item("fco_n"), item("fco_o")])
    stored(client, "x", previous_response_id=name)
    config = service.config
    service.config = structs.replace(config, max_body=LARGE + 1000)
    try:
        page = listed(client, name, order="asc").json()
        assert ([one["id"] for one in page["data"]], page["has_more"]) == (["fco_n"], True)
        page = listed(client, name, order="asc", after="fco_n").json()
        assert ([one["id"] for one in page["data"]], page["has_more"]) == (["fco_o"], False)
        service.config = structs.replace(config, max_body=1000)
        assert refusal(listed(client, name)) == (400, "invalid_value")
    finally:
        service.config = config


def test_an_item_of_the_largest_body_can_be_listed(client: httpx.Client) -> None:
    around = len(json.dumps({"model": "fake-model", "input": [item("fco_z", 0)]}))
    name = stored(client, [item("fco_z", MAX_BODY - around - 100)])
    assert len(listed(client, name).json()["data"][0]["caller"]) == MAX_BODY - around - 100


def test_unread_answers_of_a_key_are_bounded(
    client: httpx.Client, server: RunningServer, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = stored(client, [item("fco_p"), item("fco_q")])
    other = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEYS[1]}"}, timeout=DEADLINE)
    theirs = stored(other, [item("fco_r")])
    size = len(listed(client, name).content)
    monkeypatch.setattr(service.stored_budget, "max_bytes", 6 * size)
    unread = [ask(server, f"/v1/responses/{name}/input_items", KEYS[0]) for _ in range(20)]
    until(lambda: sum(begun(sock) for sock in unread) == 20, "all are answered")
    statuses = [sock.recv(12)[9:] for sock in unread]
    assert (statuses.count(b"200"), statuses.count(b"429")) == (3, 17)
    assert service.stored_budget.used <= 3 * size
    refused = listed(client, name)
    assert (*refusal(refused), "retry-after" in refused.headers) == (429, "overloaded", True)
    assert client.get(f"/v1/responses/{name}").status_code == 200, "small answers are not counted"
    assert listed(other, theirs).status_code == 200, "another key has its own half"
    for sock in unread:
        sock.close()
    until(lambda: service.stored_budget.used == 0, "closed connections return their memory")
    assert listed(client, name).status_code == 200
    other.close()


def connect(server: RunningServer) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(DEADLINE)
    sock.connect(("127.0.0.1", httpx.URL(server.url).port))
    return sock


def head(method: str, path: str, key: str) -> str:
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"


def ask(server: RunningServer, path: str, key: str) -> socket.socket:
    """Send a request of which the answer is not read."""
    sock = connect(server)
    sock.sendall(f"{head('GET', path, key)}\r\n".encode())
    return sock


def begun(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return len(sock.recv(12, socket.MSG_PEEK)) == 12
    except BlockingIOError:
        return False
    finally:
        sock.settimeout(DEADLINE)


def test_a_slow_reader_gets_a_whole_answer_in_pieces(
    client: httpx.Client, server: RunningServer, service: Service
) -> None:
    name = stored(client, [item("fco_s"), item("fco_t")])
    whole = listed(client, name).content
    with ask(server, f"/v1/responses/{name}/input_items", KEYS[0]) as sock:
        lines, body = sock.recv(4096).split(b"\r\n\r\n", 1)
        assert b"content-length: %d" % len(whole) in lines.lower()
        assert 0 < service.stored_budget.used < 2 * len(whole)
        assert client.delete(f"/v1/responses/{name}").status_code == 200, "a delete does not cut the answer"
        while len(body) < len(whole):
            body += sock.recv(30_000)
    assert body == whole
    assert refusal(listed(client, name)) == (404, "response_not_found")


def test_a_reader_that_takes_too_long_is_given_up(
    client: httpx.Client, server: RunningServer, service: Service
) -> None:
    name = stored(client, [item("fco_u"), item("fco_v")])
    config = service.config
    service.config = structs.replace(
        config, connections=structs.replace(config.connections, send_timeout=0.0, body_rate=2**23)
    )
    try:
        with ask(server, f"/v1/responses/{name}/input_items", KEYS[0]) as sock:
            until(lambda: service.stored_budget.used == 0 and begun(sock), "its memory is returned")
            read = 0
            with contextlib.suppress(ConnectionResetError):
                while data := sock.recv(2**20):
                    read += len(data)
            assert read < 2 * LARGE
    finally:
        service.config = config


def test_large_responses_are_sent_in_pieces_as_well(client: httpx.Client) -> None:
    tool = {"type": "function", "name": "f", "description": "d" * LARGE, "parameters": {"type": "object"}}
    made = create(client, "x", tools=[tool])
    assert made.status_code == 200, made.text
    found = client.get(f"/v1/responses/{made.json()['id']}")
    assert found.json() == made.json()
    assert refusal(client.post(f"/v1/responses/{made.json()['id']}/cancel")) == (400, "invalid_request")
    assert refusal(client.post("/v1/responses/resp_none/cancel")) == (404, "response_not_found")


def test_large_inputs_that_wait_to_be_stored_are_bounded(
    client: httpx.Client, server: RunningServer, engine: FakeEngine, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.stored_budget, "max_bytes", 3 * LARGE)
    engine.hold = True
    body = json.dumps({"model": "fake-model", "input": [item("fco_w")], "stream": True})
    with connect(server) as sock:
        sock.sendall(f"{head('POST', '/v1/responses', KEYS[0])}content-length: {len(body)}\r\n\r\n{body}".encode())
        until(lambda: service.stored_budget.used > LARGE, "its input is held")
        assert refusal(create(client, [item("fco_x")])) == (429, "overloaded")
        assert service.stored_budget.used < 2 * LARGE
    until(lambda: service.stored_budget.used == 0, "a client that leaves returns its memory")


def test_a_key_that_stores_much_does_not_make_others_lose_responses(
    client: httpx.Client, server: RunningServer
) -> None:
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEYS[1]}"}, timeout=DEADLINE) as other:
        name = stored(other, "keep this")
        for n in range(24):
            stored(client, [item(f"fco_{n}"), item(f"fco_{n}_2")])
        assert other.get(f"/v1/responses/{name}").status_code == 200
        assert listed(other, name).json()["data"][0]["content"][0]["text"] == "keep this"


def test_small_requests_with_large_conversations_share_the_budget_of_bodies(
    client: httpx.Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stored(client, [item("fco_y")])
    budget = service.body_budget
    owner = unnamed_key(KEYS[0]).owner
    monkeypatch.setattr(budget, "max_bytes", 4 * LARGE)
    with budget.reservation(owner) as held:
        held.grow(LARGE + MAX_INLINE_BODY)
        for given, fields in (([reference("fco_y")], {}), ("x", {"previous_response_id": first})):
            refused = create(client, given, **fields)
            assert refusal(refused) == (429, "overloaded")
    assert create(client, "x", previous_response_id=first, store=False).status_code == 200
