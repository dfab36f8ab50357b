"""The line of each request, and what never gets into the log."""

import json
import logging
import re
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tandem.frontend.server.access_log import AccessLine, AccessLog, access_text, client_text
from tandem.protocol.errors import ErrorCode
from tandem.protocol.logs import ACCESS_LOGGER, REQUESTS_LOGGER, LineHandler
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, get, open_stream, post, until
from tests.support.broken_stream import LONG, post_broken_stream

BODY = {"model": "fake-model", "prompt": "one two", "max_tokens": 3}
FIELD = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|\S+)')


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Collect the messages of the access log while the test runs."""
    caplog.set_level(logging.INFO, ACCESS_LOGGER)
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    collector = Collector()
    logging.getLogger(ACCESS_LOGGER).addHandler(collector)
    yield found
    logging.getLogger(ACCESS_LOGGER).removeHandler(collector)


def only(lines: list[str]) -> dict[str, str]:
    """Return the fields of the one line."""
    until(lambda: lines, "the line of the request")
    (line,) = lines
    lines.clear()
    return {"request": line.partition(" request_id=")[0], **dict(FIELD.findall(line))}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_one_line_with_its_figures(
    engine: FakeEngine, server: RunningServer, lines: list[str], stream: bool
) -> None:
    engine.cached = lambda _: 1
    post(server.url + "/v1/completions", json={**BODY, "n": 2, "stream": stream}, headers={"x-request-id": "mine 1"})
    line = only(lines)
    assert line["request"] == "POST /v1/completions 200"
    assert line["request_id"] == '"mine 1"'
    assert re.fullmatch(r"127\.0\.0\.1:\d+", line["client"])
    assert (line["model"], line["output_tokens"], line["cached_tokens"]) == ("fake-model", "6", "1")
    assert int(line["prompt_tokens"]) >= 2
    assert 0 < float(line["ttft"]) <= float(line["duration"])
    assert (line["finish_reason"], line["end"]) == ("length", "complete")
    assert "key" not in line and "error" not in line and "drafted_tokens" not in line


def test_the_line_counts_the_drafts_of_all_choices(engine: FakeEngine, server: RunningServer, lines: list[str]) -> None:
    engine.drafts, engine.tokens_per_step = (5, 2, False), 9
    post(server.url + "/v1/completions", json={**BODY, "n": 2})
    line = only(lines)
    assert (line["drafted_tokens"], line["accepted_tokens"]) == ("10", "4")


def test_a_refusal_is_told_by_its_code(server: RunningServer, lines: list[str]) -> None:
    post(server.url + "/v1/completions", json={**BODY, "max_tokens": -3})
    line = only(lines)
    assert (line["request"], line["end"], line["error"]) == ("POST /v1/completions 400", "error", "invalid_value")
    assert "ttft" not in line and "prompt_tokens" not in line
    get(server.url + "/no/such%1b%5b31m%20path")
    line = only(lines)
    assert line["request"] == "GET other 404"
    assert line["path"] == '"/no/such\\x1b[31m path"'


def test_a_429_has_one_line_with_the_limit(
    engine: FakeEngine, server: RunningServer, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    engine.refusal = ErrorCode.OVERLOADED
    assert post(server.url + "/v1/completions", json=BODY).status_code == 429
    line = only(lines)
    assert (line["request"], line["error"]) == ("POST /v1/completions 429", "overloaded")
    assert (line["reason"], line["detail"]) == ("engine_overloaded", '"refused by the fake engine"')
    until(lambda: any("429" in message for message in caplog.messages), "the line in the log")
    assert len([message for message in caplog.messages if "429" in message]) == 1


def test_429s_are_told_without_the_access_log(
    engine: FakeEngine, config: FrontendConfig, caplog: pytest.LogCaptureFixture
) -> None:
    engine.start()
    engine.refusal = ErrorCode.OVERLOADED
    running = RunningServer(structs.replace(config, access_log=False)).start().ready()
    try:
        for _ in range(5):
            assert post(running.url + "/v1/completions", json=BODY).status_code == 429
    finally:
        running.stop()
    (line,) = [message for message in caplog.messages if "429" in message]
    assert line.startswith("429 for POST '/v1/completions', request id req_")
    assert line.endswith(": 'refused by the fake engine'")


def test_a_stream_that_breaks_has_the_code_of_its_error(
    engine: FakeEngine, server: RunningServer, lines: list[str]
) -> None:
    post_broken_stream(engine, server.url + "/v1/completions", {**BODY, "max_tokens": LONG})
    line = only(lines)
    assert (line["request"], line["end"]) == ("POST /v1/completions 200", "error")
    assert line["error"] == ErrorCode.MODEL_FAILED.value and 1 <= int(line["output_tokens"]) < LONG


def test_a_client_that_leaves_is_told(engine: FakeEngine, server: RunningServer, lines: list[str]) -> None:
    engine.step_seconds = 0.05
    with open_stream("POST", server.url + "/v1/completions", json={**BODY, "max_tokens": 500, "stream": True}) as got:
        next(got.iter_raw())
    line = only(lines)
    assert (line["request"], line["end"]) == ("POST /v1/completions 200", "disconnect")
    assert int(line["output_tokens"]) >= 1 and "finish_reason" not in line


def test_health_checks_and_scrapes_have_no_line(server: RunningServer, lines: list[str]) -> None:
    for path in ("/health/live", "/health/ready", "/health", "/ping", "/metrics"):
        get(server.url + path)
    get(server.url + "/v1/models")
    assert only(lines)["request"] == "GET /v1/models 200"


def test_a_refused_scrape_has_a_line(engine: FakeEngine, config: FrontendConfig, lines: list[str]) -> None:
    engine.start()
    running = RunningServer(structs.replace(config, api_keys=("secret",))).start().ready()
    try:
        get(running.url + "/metrics", headers={"authorization": "Bearer secret"})
    finally:
        running.stop()
    line = only(lines)
    assert (line["request"], line["error"]) == ("GET /metrics 403", "insufficient_permissions")


def test_the_access_log_can_be_turned_off(engine: FakeEngine, config: FrontendConfig, lines: list[str]) -> None:
    engine.start()
    running = RunningServer(structs.replace(config, access_log=False)).start().ready()
    try:
        post(running.url + "/v1/completions", json=BODY)
    finally:
        running.stop()
    assert lines == []


MARKER = "Zq7marker"
BROKEN = st.sampled_from([None, -1, 10**12, 1.5, "", MARKER, [MARKER], {MARKER: MARKER}, [[MARKER]], True])
FIELDS = st.sampled_from(
    ["model", "max_tokens", "temperature", "n", "stop", "stream", "tools", "tool_choice", "response_format", "seed",
     "logit_bias", "session_id", "cache_salt", "regex", "choice", "grammar", "guided_json", "messages", "prompt",
     "input", "system", "text", "user", "metadata", MARKER],
)  # fmt: skip
ROUTES = st.sampled_from(
    ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages",
     "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/admin/scheduler"],
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=ROUTES, broken=st.dictionaries(FIELDS, BROKEN, max_size=2), cut=st.booleans(), fault=st.booleans())
def test_no_part_of_a_body_is_logged(
    server: RunningServer,
    caplog: pytest.LogCaptureFixture,
    path: str,
    broken: dict[str, object],
    cut: bool,
    fault: bool,
) -> None:
    caplog.set_level(logging.DEBUG)
    messages = [{"role": "user", "content": MARKER}]
    body = json.dumps(
        {"model": "fake-model", "prompt": MARKER, "input": MARKER, "messages": messages, "max_tokens": 2, **broken}
    )
    service, ready = server.server._service, server.server._service.ready
    if fault:

        def fail() -> None:
            raise KeyError(MARKER)

        service.ready = fail  # type: ignore[assignment]
    try:
        post(server.url + path, content=body[:-9] if cut else body, headers={"content-type": "application/json"})
    finally:
        service.ready = ready  # type: ignore[method-assign]
    formatter = LineHandler("frontend", "text", sys.stderr)
    ours = [record for record in caplog.records if record.name.startswith(("tandem", "uvicorn", "asyncio"))]
    assert [line for line in map(formatter.format, ours) if MARKER in line] == []
    caplog.clear()


def test_prompts_are_logged_if_asked_for(
    engine: FakeEngine, config: FrontendConfig, caplog: pytest.LogCaptureFixture
) -> None:
    engine.start()
    caplog.set_level(logging.INFO, REQUESTS_LOGGER)
    running = RunningServer(structs.replace(config, log_requests=True, max_log_len=6)).start().ready()
    try:
        post(running.url + "/v1/completions", json={**BODY, "prompt": ["one two three", "a"]})
        post(running.url + "/v1/completions", json={**BODY, "prompt": [5, 6, 7]})
    finally:
        running.stop()
    logged = [vars(record)["fields"] for record in caplog.records if record.name == REQUESTS_LOGGER]
    assert [fields["prompt"] for fields in logged[:2]] == ["one tw", "a"]
    assert logged[2]["prompt_tokens"] == 3 and 0 < len(logged[2]["prompt"]) <= 6
    assert {fields["max_tokens"] for fields in logged} == {3}


@given(st.text(), st.text())
def test_a_line_of_text_can_be_read_back(request_id: str, path: str) -> None:
    line = AccessLine(request_id, client="1.2.3.4:5", method="GET", route="other", path=path, status=404, end="error")
    text = access_text(line)
    assert text.isprintable()
    fields = dict(FIELD.findall(text))
    assert (
        {"request_id", "client", "duration", "end"}
        <= set(fields)
        <= {"request_id", "client", "path", "duration", "end"}
    )
    assert fields["client"] == "1.2.3.4:5"


@pytest.mark.parametrize(
    ("client", "shown"),
    [(("10.0.0.1", 80), "10.0.0.1:80"), (("10.0.0.1", 0), "10.0.0.1"), (("", 0), ""), (None, "")],
)
def test_a_client_is_named_as_far_as_it_is_known(client: object, shown: str) -> None:
    assert client_text({"client": client}) == shown


def test_json_has_the_members_of_every_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    with path.open("w") as stream:
        handler = LineHandler("frontend-0", "json", stream)
        monkeypatch.setattr("tandem.frontend.server.access_log.line_handler", lambda: handler)
        monkeypatch.setattr(logging.getLogger(ACCESS_LOGGER), "level", logging.INFO)
        AccessLog().write({"path": "/é\n", "method": "GET", "headers": [], "client": None, "query_string": b""})
    line = json.loads(path.read_text())
    assert line["logger"] == ACCESS_LOGGER and line["message"] == "GET other" and line["level"] == "info"
    assert (line["path"], line["route"], line["end"]) == ("/é\n", "other", "disconnect")
