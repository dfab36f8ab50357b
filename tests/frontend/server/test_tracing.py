"""Traces that a collector gets."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tandem.frontend.server import tracing
from tests.fakes.collector import Collector, attributes, collector
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, get, post, until

BODY = {"model": "fake-model", "prompt": "one two", "max_tokens": 3, "temperature": 0.5}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, LEFT_OUT = ({"traceparent": f"00-{TRACE}-{PARENT}-{flags}"} for flags in ("01", "00"))


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with collector() as server:
        yield server


@pytest.fixture
def traced(engine: FakeEngine, config: FrontendConfig, spans: Collector) -> Iterator[RunningServer]:
    """A server that sends traces, and holds requests that lose their engine."""
    engine.start()
    settings = structs.replace(config, otlp_traces_endpoint=spans.url, hold_timeout=30.0)
    running = RunningServer(settings).start().ready()
    yield running
    running.stop()


def root_of(spans: Collector) -> Any:
    """Wait for the one request, and return its span."""
    until(lambda: spans.named("llm_request"), "the span of the request")
    (root,) = spans.named("llm_request")
    return root


def assert_nested(spans: Collector, parent: Any) -> None:
    """Check that each span lies within its parent, and siblings that follow one another do not overlap."""
    assert parent.start_time_unix_nano <= parent.end_time_unix_nano
    for child in spans.within(parent):
        assert parent.start_time_unix_nano <= child.start_time_unix_nano, (parent.name, child.name)
        assert child.end_time_unix_nano <= parent.end_time_unix_nano, (parent.name, child.name)
        assert_nested(spans, child)


def test_a_request_is_a_tree_of_spans_in_the_callers_trace(traced: RunningServer, spans: Collector) -> None:
    post(traced.url + "/v1/completions", json=BODY, headers={**SAMPLED, "x-request-id": "mine"})
    root = root_of(spans)
    assert spans.services == {"tandem"} and set(spans.paths) == {"/v1/traces"}
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.kind) == (TRACE, PARENT, 2)
    assert [span.name for span in spans.within(root)] == ["parse", "tokenize", "engine"]
    (engine,) = spans.within(root, "engine")
    assert [span.name for span in spans.within(engine)] == ["queue", "prefill", "decode"]
    assert_nested(spans, root)
    found = attributes(root)
    expected = {
        "gen_ai.request.id": "mine", "gen_ai.request.max_tokens": 3, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.n": 1, "gen_ai.response.model": "fake-model", "gen_ai.usage.completion_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"], "http.response.status_code": 200,
        "http.route": "/v1/completions", "tandem.end": "complete",
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected
    assert found["gen_ai.usage.prompt_tokens"] >= 2
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert found["gen_ai.latency.time_in_queue"] == pytest.approx(0.0001)
    counted = 'tandem_frontend_trace_spans_total{outcome="exported"} 7.0'
    until(lambda: counted in get(traced.url + "/metrics").text, "the answer of the collector is counted")


def test_every_choice_has_a_span_in_the_engine(traced: RunningServer, spans: Collector) -> None:
    post(traced.url + "/v1/completions", json={**BODY, "n": 2, "stream": True}, headers=SAMPLED)
    engines = spans.within(root_of(spans), "engine")
    assert sorted(attributes(span)["tandem.choice"] for span in engines) == [0, 1]


def test_the_callers_choice_of_samples_is_followed(engine: FakeEngine, traced: RunningServer, spans: Collector) -> None:
    assert post(traced.url + "/v1/completions", json=BODY, headers=LEFT_OUT).status_code == 200
    assert post(traced.url + "/v1/completions", json=BODY, headers=SAMPLED).status_code == 200
    assert [submit.is_traced for submit in engine.submits] == [False, True]
    assert root_of(spans).trace_id.hex() == TRACE


def test_the_sampler_of_the_environment_is_followed(
    engine: FakeEngine, config: FrontendConfig, spans: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    engine.start()
    running = RunningServer(structs.replace(config, otlp_traces_endpoint=spans.url + "/own/path")).start().ready()
    try:
        post(running.url + "/v1/completions", json=BODY)
        post(running.url + "/v1/completions", json=BODY, headers=SAMPLED)
        assert root_of(spans).trace_id.hex() == TRACE
    finally:
        running.stop()
    assert set(spans.paths) == {"/own/path"}
    assert [submit.is_traced for submit in engine.submits] == [False, True]


def test_a_request_that_lost_its_engine_shows_both(engine: FakeEngine, traced: RunningServer, spans: Collector) -> None:
    engine.hold = True
    asked = threading.Thread(target=post, args=(traced.url + "/v1/completions",), kwargs={"json": BODY})
    asked.start()
    until(lambda: engine.submits, "the engine has the request")
    first = engine.epoch
    engine.die()
    engine.hold = False
    engine.start()
    asked.join()
    root = root_of(spans)
    lost, kept = spans.within(root, "engine")
    assert attributes(lost)["tandem.engine.epoch"] == str(first)
    assert attributes(kept)["tandem.engine.epoch"] == str(engine.epoch)
    assert [attributes(span)["tandem.attempt"] for span in (lost, kept)] == [1, 2]
    assert lost.status.code == 2 and "lost" in lost.status.message
    assert lost.end_time_unix_nano <= kept.start_time_unix_nano
    assert_nested(spans, root)


def test_a_refusal_is_a_span_without_the_engine(traced: RunningServer, spans: Collector) -> None:
    post(traced.url + "/v1/completions", json={**BODY, "max_tokens": -3}, headers=SAMPLED)
    root = root_of(spans)
    assert (attributes(root)["error.type"], attributes(root)["tandem.end"]) == ("invalid_value", "error")
    assert root.status.code == 0 and spans.within(root, "engine") == []


def test_a_collector_that_is_away_costs_its_spans_alone(
    engine: FakeEngine, config: FrontendConfig, spans: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    spans.status = 400
    engine.start()
    running = RunningServer(structs.replace(config, otlp_traces_endpoint=spans.url)).start().ready()
    metric = 'tandem_frontend_trace_spans_total{{outcome="{}"}} '
    try:
        for _ in range(3):
            assert post(running.url + "/v1/completions", json=BODY, headers=SAMPLED).status_code == 200
        until(lambda: metric.format("failed") in get(running.url + "/metrics").text, "spans failed")
        until(lambda: metric.format("dropped") in get(running.url + "/metrics").text, "spans were dropped")
    finally:
        running.stop()
    assert spans.spans == []


def test_a_collector_that_never_answers_does_not_keep_the_server_from_ending(
    engine: FakeEngine, config: FrontendConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_CLOSE_SECONDS", 0.5)
    engine.start()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        running = RunningServer(structs.replace(config, otlp_traces_endpoint=endpoint)).start().ready()
        try:
            assert post(running.url + "/v1/completions", json=BODY, headers=SAMPLED).status_code == 200
        finally:
            running.stop()
        silent.settimeout(30)
        silent.accept()[0].close()  # it was asked
