"""The field `prediction` of chats over a real socket, in front of a fake engine that verifies drafts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec import structs

from tandem.frontend.api.completions.request import BODY as COMPLETION
from tandem.frontend.api.messages.request import BODY as MESSAGE
from tandem.frontend.api.responses.request import BODY as RESPONSE
from tandem.protocol.codec import unpack_ids
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer
from tests.frontend.conftest import post as send
from tests.support.event_stream import events
from tests.support.reasoning_model import answer_with, encode, write_reasoning_model
from tests.support.shared_frontend import SharedFrontend, shared_frontend

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
TEXT = "use os.path.join"
PREDICTION = {"type": "content", "content": TEXT}
MOST = 40


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reasoning_model(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture(scope="module")
def shared(model_dir: Path) -> Iterator[SharedFrontend]:
    with shared_frontend(model_dir, max_prediction=MOST) as running:
        yield running


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> Iterator[SharedFrontend]:
    """A server whose engine verifies no drafts."""
    with shared_frontend(model_dir) as running:
        yield running


@pytest.fixture(autouse=True)
def engine(shared: SharedFrontend) -> FakeEngine:
    engine = shared.renewed_engine()
    engine.script = answer_with(TEXT)
    return engine


@pytest.fixture
def server(shared: SharedFrontend) -> RunningServer:
    return shared.server


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "fake-model", "messages": [{"role": "user", "content": "how?"}], **fields}


def post(server: RunningServer, **fields: Any) -> httpx.Response:
    return send(server.url + "/v1/chat/completions", json=body(**fields))


def counted(usage: dict[str, Any]) -> tuple[int, int]:
    details = usage["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (TEXT, TEXT),
        ([{"type": "text", "text": "use os"}, {"type": "text", "text": ".path.join"}], TEXT),
        ([{"type": "text", "text": ""}], ""),
        ("", ""),
    ],
)
def test_its_tokens_go_to_the_engine(server: RunningServer, engine: FakeEngine, content: Any, expected: str) -> None:
    response = post(server, prediction={"type": "content", "content": content})
    assert response.status_code == 200 and "x-tandem-ignored" not in response.headers
    assert unpack_ids(engine.submits[0].prediction) == encode(expected)


def test_a_request_without_one_sends_none(server: RunningServer, engine: FakeEngine) -> None:
    for fields in ({}, {"prediction": None}, {"prediction": PREDICTION, "speculation": False}):
        details = post(server, **fields).json()["usage"]["completion_tokens_details"]
        assert ("accepted_prediction_tokens" in details) == (fields.get("prediction") is not None)
    assert [submit.prediction for submit in engine.submits] == [b""] * 3
    assert [submit.speculation for submit in engine.submits] == [True, True, False]


def test_a_long_one_is_cut_to_what_the_engine_uses(server: RunningServer, engine: FakeEngine) -> None:
    text = "ab" * 3000
    assert post(server, prediction={"type": "content", "content": text}).status_code == 200
    assert unpack_ids(engine.submits[0].prediction) == encode(text)[:MOST]


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ([PREDICTION], "prediction"),
        ({}, "prediction"),
        ({"content": "x"}, "prediction"),
        ({"type": "content"}, "prediction"),
        ({"type": "tokens", "content": "x"}, "prediction.type"),
        ({"type": 1, "content": "x"}, "prediction.type"),
        ({"type": "content", "content": None}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": []}, "prediction.content"),
        ({"type": "content", "content": ["x"]}, "prediction.content[0]"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0]"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": {}}]}, "prediction.content[0].type"),
        ({"type": "content", "content": "x" * 2**20}, "prediction"),
    ],
)
def test_other_forms_are_refused(server: RunningServer, engine: FakeEngine, prediction: Any, param: str) -> None:
    response = post(server, prediction=prediction)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not engine.submits


def test_unknown_names_within_it_are_ignored(server: RunningServer, engine: FakeEngine) -> None:
    response = post(server, prediction={**PREDICTION, "strength": 2})
    assert response.headers["x-tandem-ignored"] == "prediction.strength"
    assert unpack_ids(engine.submits[0].prediction) == encode(TEXT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_usage_counts_its_drafts(server: RunningServer, engine: FakeEngine, stream: bool, n: int) -> None:
    engine.drafts, engine.tokens_per_step = (5, 3, True), 8
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = post(server, prediction=PREDICTION, n=n, **options)
    usage = events(response)[-1]["usage"] if stream else response.json()["usage"]
    steps = n * -(-len(encode(TEXT)) // 8)
    assert counted(usage) == (3 * steps, 2 * steps)


def test_usage_counts_no_drafts_from_elsewhere(server: RunningServer, engine: FakeEngine) -> None:
    engine.drafts = (5, 3, False)
    assert counted(post(server, prediction=PREDICTION).json()["usage"]) == (0, 0)


def test_usage_counts_the_drafts_before_a_stop_string(server: RunningServer, engine: FakeEngine) -> None:
    """The engine has not reported the end of the sequence then; of a step's tokens only some may be used."""
    engine.script = answer_with("abcd" * 20)
    engine.drafts, engine.tokens_per_step = (7, 7, True), 8
    usage = post(server, prediction=PREDICTION, stop=["cdab"]).json()["usage"]
    assert usage["completion_tokens"] == 6
    assert counted(usage)[0] == 6


def test_usage_counts_no_accepted_drafts_behind_a_stop_string(server: RunningServer, engine: FakeEngine) -> None:
    """The last of eight tokens of a step is no draft, so of eleven tokens ten are."""
    engine.script = answer_with("aaaaaaaabcdefghijklmnopqrstuvwxyz")
    engine.drafts, engine.tokens_per_step = (7, 7, True), 8
    usage = post(server, prediction=PREDICTION, stop=["cd"]).json()["usage"]
    assert (usage["completion_tokens"], counted(usage)[0]) == (11, 10)


def test_openais_client_reads_the_counts(server: RunningServer, engine: FakeEngine) -> None:
    engine.drafts, engine.tokens_per_step = (4, 3, True), 100
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        reply = client.chat.completions.create(
            model="fake-model",
            messages=[{"role": "user", "content": "how?"}],
            prediction={"type": "content", "content": TEXT},
        )
    assert reply.usage is not None and (details := reply.usage.completion_tokens_details) is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3, 1)


def test_an_engine_without_drafts_gets_none_and_it_is_named_as_ignored(plain: SharedFrontend) -> None:
    engine = plain.renewed_engine()
    engine.script = answer_with(TEXT)
    response = post(plain.server, prediction=PREDICTION)
    assert (response.status_code, response.headers["x-tandem-ignored"]) == (200, "prediction")
    assert counted(response.json()["usage"]) == (0, 0)
    assert engine.submits[-1].prediction == b""
    assert post(plain.server, prediction={"type": "content"}).status_code == 400


def test_only_chats_have_it() -> None:
    """As in OpenAI's API; elsewhere it is an unknown name."""
    assert not any("prediction" in known.names for known in (COMPLETION, RESPONSE, MESSAGE))


def test_a_strict_server_without_drafts_refuses_it(model_dir: Path) -> None:
    with shared_frontend(model_dir, lambda config: structs.replace(config, unknown_fields="refuse")) as strict:
        response = post(strict.server, prediction=PREDICTION)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prediction")
        assert post(strict.server, prediction=None).status_code == 200
