"""Lines about operators and refused keys."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tandem.protocol.logs import AUDIT_LOGGER, LineHandler, LogFormat
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


def lines(caplog: pytest.LogCaptureFixture, log_format: LogFormat) -> list[str]:
    handler = LineHandler("frontend-0", log_format, io.StringIO())
    return [handler.format(record) for record in caplog.records if record.name == AUDIT_LOGGER]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.partition(f"{AUDIT_LOGGER}: ")[2] for line in lines(caplog, "text")]


def test_refused_keys_are_few_lines_without_the_key(guarded: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(20):
        headers = {"authorization": f"Bearer wrong-{number}"}
        assert get(guarded.url + f"/v1/models?api_key=wrong-{number}", headers=headers).status_code == 401
    until(lambda: told(caplog), "the line")
    (line,) = told(caplog)
    assert " method=GET path=/v1/models client=127.0.0.1:" in line
    assert line.endswith(" status=401")
    (fields,) = map(json.loads, lines(caplog, "json"))
    assert (fields["method"], fields["path"], fields["status"]) == ("GET", "/v1/models", 401)
    assert fields["client"].startswith("127.0.0.1:") and "key" not in fields
    assert "wrong" not in caplog.text


def test_a_key_without_the_right_is_named(guarded: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    assert get(guarded.url + "/admin/pause", headers={"authorization": "Bearer secret-key"}).status_code == 403
    until(lambda: told(caplog), "the line")
    (line,) = told(caplog)
    assert " method=GET path=/admin/pause key=key-" in line and line.endswith(" status=403")
    assert "secret" not in caplog.text


def test_a_key_without_the_right_is_named_though_its_address_guesses_keys(
    guarded: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        get(guarded.url + "/v1/models", headers={"authorization": f"Bearer wrong-{number}"})
    get(guarded.url + "/metrics", headers={"authorization": "Bearer secret-key"})
    until(lambda: len(told(caplog)) >= 2, "the line of the key")
    assert " method=GET path=/metrics key=key-" in told(caplog)[1]


def test_calls_of_operators_are_told(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, AUDIT_LOGGER)
    post(server.url + "/admin/scheduler", json={"policy": "decode_first"}, headers={"x-request-id": "op-1"})
    post(server.url + "/admin/pause?mode=keep&new_requests=refuse")
    post(server.url + "/admin/resume")
    get(server.url + "/v1/models")
    until(lambda: len(told(caplog)) >= 3, "three lines")
    first, second, third = told(caplog)
    head = "operator request method=POST path="
    assert first.startswith(f"{head}/admin/scheduler client=127.0.0.1:") and "request_id=op-1 status=200" in first
    assert second.startswith(f'{head}"/admin/pause?mode=keep&new_requests=refuse" client=')
    assert third.startswith(f"{head}/admin/resume client=")
    fields = json.loads(lines(caplog, "json")[0])
    assert (fields["message"], fields["request_id"], fields["status"]) == ("operator request", "op-1", 200)


def test_of_a_query_only_known_words_are_told(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for path in ("/admin/scheduler", "/v1/models", "/no/such/path"):
        get(server.url + path + "?api_key=SECRET&SECRET&note=%53ECRET&SECRET==&mode=SECRET&mode=abort")
    until(lambda: told(caplog), "the line of the operator")
    (line,) = told(caplog)
    assert line.startswith('operator request method=GET path="/admin/scheduler?mode=abort" client=')
    until(lambda: any("GET other 404" in message for message in caplog.messages), "the line of the last request")
    handler = LineHandler("frontend-0", "json", io.StringIO())
    written = [handler.format(record) for record in caplog.records if record.name.startswith("tandem")]
    assert written and not any("SECRET" in message for message in written)
