"""Counts of requests by their end, and bucket bounds."""

import pytest
from prometheus_client import CollectorRegistry

from tandem.frontend.metrics.exposition import Exposition
from tandem.frontend.metrics.request_metrics import (
    FIRST_TOKEN_SECONDS,
    REQUEST_SECONDS,
    TOKEN_SECONDS,
    RequestMetrics,
    refusal_reason,
)
from tests.fakes.engine import FakeEngine
from tests.fakes.tokenizer import byte_level_tokenizer
from tests.frontend.conftest import RunningServer, get, post, until
from tests.support.broken_stream import LONG, post_broken_stream
from tests.support.event_stream import events
from tests.support.scrape import value


@pytest.mark.parametrize(
    ("status", "code", "limit", "reason"),
    [
        (429, "overloaded", "concurrency", "concurrency"), (529, "overloaded", "bodies", "bodies"),
        (529, "overloaded", "", "engine_overloaded"), (529, "engine_unavailable", "", "unavailable"),
        (529, "engine_paused", "", "unavailable"), (529, "shutting_down", "", "unavailable"),
        (429, "overloaded", "", "engine_overloaded"), (429, "rate_limit_exceeded", "", "key_limit"),
        (401, "invalid_api_key", "", "key"), (403, "missing_right", "", "right"),
        (413, "request_too_large", "", "body_size"),
        (421, "misdirected", "", "host"), (503, "engine_unavailable", "", "unavailable"),
        (400, "invalid_value", "", None),
        (500, "engine_failed", "", None),
    ],
)  # fmt: skip
def test_refusals_are_told_apart(status: int, code: str, limit: str, reason: str | None) -> None:
    assert refusal_reason(status, code, limit) == reason


def test_bounds_ascend_resolve_a_fifth_of_a_millisecond_and_reach_vllms_ends() -> None:
    for bounds in (FIRST_TOKEN_SECONDS, TOKEN_SECONDS, REQUEST_SECONDS):
        assert list(bounds) == sorted(set(bounds))
    fine = [bound for bound in TOKEN_SECONDS if bound <= 0.001]
    assert max(after - before for before, after in zip([0.0, *fine], fine, strict=False)) <= 0.0002 + 1e-12
    assert (FIRST_TOKEN_SECONDS[-1], TOKEN_SECONDS[-1], REQUEST_SECONDS[-1]) == (2560.0, 80.0, 7680.0)


def test_ends_are_counted_with_route_stages_and_refusal() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    metrics.end("/v1/completions", 3.0, [("tokenize", 0.002)], None)
    metrics.end("/v1/completions", 0.5, [], "concurrency")
    metrics.answered(3.0, 2.0, 7, 2, 11)
    metrics.answered(1.0, 0.0, 7, 1, 1)
    text = Exposition([registry], lambda: "m").text()
    for series, number in {
        'tandem_http_request_duration_seconds_sum{route="/v1/completions"}': 3.5,
        'tandem_request_stage_seconds_sum{stage="tokenize"}': 0.002,
        'tandem_refused_requests_total{reason="concurrency"}': 1.0,
        'tandem_e2e_request_latency_seconds_sum{model_name="m"}': 4.0,
        'tandem_request_time_per_output_token_seconds_sum{model_name="m"}': 0.2,
        'tandem_request_time_per_output_token_seconds_count{model_name="m"}': 1.0,
        'tandem_request_params_n_bucket{model_name="m",le="1.0"}': 1.0,
        'tandem_request_max_num_generation_tokens_sum{model_name="m"}': 12.0,
        "tandem_frontend_prompt_tokens_total": 14.0,
    }.items():
        assert value(text, series) == number, series
    assert value(text, "tandem_refused_requests_total") == 1
    assert "_created" not in text


def test_a_stream_that_breaks_is_not_answered_in_full(engine: FakeEngine, server: RunningServer) -> None:
    body = {"model": "fake-model", "prompt": "one two", "max_tokens": 3}
    post(server.url + "/v1/completions", json=body)
    *chunks, last = events(post_broken_stream(engine, server.url + "/v1/completions", {**body, "max_tokens": LONG}))
    assert "error" in last
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    broken = len(byte_level_tokenizer().encode(text).ids)

    def scrape() -> str:
        return get(server.url + "/metrics").text

    until(lambda: value(scrape(), "tandem_frontend_broken_streams_total") == 1, "the broken stream is counted")
    text = scrape()
    assert value(text, "tandem_e2e_request_latency_seconds_count") == 1
    assert value(text, "tandem_request_max_num_generation_tokens_sum") == 3
    assert value(text, "tandem_frontend_generation_tokens_total") == 3 + broken > 3
