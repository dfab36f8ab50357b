"""Lines about operators and refused keys."""

import logging
from collections.abc import Iterator

import pytest
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tandem.protocol.logs import AUDIT_LOGGER
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, get, post, until


@pytest.fixture
def guarded(engine: FakeEngine, config: FrontendConfig, caplog: pytest.LogCaptureFixture) -> Iterator[RunningServer]:
    """A server whose requests need the key `secret-key`."""
    caplog.set_level(logging.INFO, AUDIT_LOGGER)
    engine.start()
    running = RunningServer(structs.replace(config, api_keys=("secret-key",))).start().ready()
    yield running
    running.stop()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == AUDIT_LOGGER]


def test_refused_keys_are_few_lines_without_the_key(guarded: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(20):
        headers = {"authorization": f"Bearer wrong-{number}"}
        assert get(guarded.url + f"/v1/models?api_key=wrong-{number}", headers=headers).status_code == 401
    until(lambda: told(caplog), "the line")
    (line,) = told(caplog)
    assert line.startswith("refused: no valid key: GET /v1/models key=- client=127.0.0.1:")
    assert line.endswith(" status=401")
    assert "wrong" not in caplog.text


def test_a_key_without_the_right_is_named(guarded: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    assert get(guarded.url + "/admin/pause", headers={"authorization": "Bearer secret-key"}).status_code == 403
    until(lambda: told(caplog), "the line")
    (line,) = told(caplog)
    assert line.startswith("refused: a key without the right: GET /admin/pause key=key-")
    assert "secret" not in caplog.text


def test_a_key_without_the_right_is_named_though_its_address_guesses_keys(
    guarded: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        get(guarded.url + "/v1/models", headers={"authorization": f"Bearer wrong-{number}"})
    get(guarded.url + "/metrics", headers={"authorization": "Bearer secret-key"})
    until(lambda: len(told(caplog)) >= 2, "the line of the key")
    assert told(caplog)[1].startswith("refused: a key without the right: GET /metrics key=key-")


def test_calls_of_operators_are_told(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, AUDIT_LOGGER)
    post(server.url + "/admin/scheduler", json={"policy": "decode_first"}, headers={"x-request-id": "op-1"})
    post(server.url + "/admin/pause?mode=keep&new_requests=refuse")
    post(server.url + "/admin/resume")
    get(server.url + "/v1/models")
    until(lambda: len(told(caplog)) >= 3, "three lines")
    first, second, third = told(caplog)
    assert first.startswith("POST /admin/scheduler key=- client=127.0.0.1:") and "request_id=op-1 status=200" in first
    assert second.startswith('POST "/admin/pause?mode=keep&new_requests=refuse" key=-')
    assert third.startswith("POST /admin/resume key=-")


def test_of_a_query_only_known_words_are_told(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for path in ("/admin/scheduler", "/v1/models", "/no/such/path"):
        get(server.url + path + "?api_key=SECRET&SECRET&note=%53ECRET&SECRET==&mode=SECRET&mode=abort")
    until(lambda: told(caplog), "the line of the operator")
    (line,) = told(caplog)
    assert line.startswith('GET "/admin/scheduler?mode=abort" key=-')
    until(lambda: any("GET other 404" in message for message in caplog.messages), "the line of the last request")
    written = [record.getMessage() for record in caplog.records if record.name.startswith("tandem")]
    assert written and not any("SECRET" in message for message in written)
