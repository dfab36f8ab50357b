"""Sums of metrics over processes equal those of one process that had done all the work."""

from collections.abc import Iterator
from random import Random

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tandem.frontend.metrics.frontend_metrics import FrontendMetrics
from tandem.frontend.metrics.instruments import InstrumentRegistry
from tandem.frontend.metrics.metric_totals import MetricTotals
from tandem.frontend.metrics.reports import Report, families_of

ACTIONS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["request", "error", "token", "open", "restart"])), max_size=60
)


def sent(metrics: FrontendMetrics) -> Report:
    """Return what a supervisor gets of a frontend's report."""
    return msgspec.json.decode(msgspec.json.encode(metrics.registry.report()), type=Report)


def act(metrics: FrontendMetrics, action: str, number: int) -> None:
    """Count something as a frontend does."""
    match action:
        case "request" | "error":
            metrics.requests.labels("/v1/completions", "200" if action == "request" else "500").inc()
        case "token":
            metrics.inter_token.observe(number / 128)
            metrics.generation_tokens.value += 3
        case "open":
            metrics.running.inc()


def values(registry: CollectorRegistry) -> Iterator[tuple[str, str, float]]:
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                yield sample.name, str(sorted(sample.labels.items())), sample.value


@given(ACTIONS)
def test_sums_are_those_of_one_process_whichever_processes_end(actions: list[tuple[int, str]]) -> None:
    alone = FrontendMetrics(InstrumentRegistry())
    totals = MetricTotals()
    processes = {slot: FrontendMetrics(InstrumentRegistry()) for slot in range(3)}
    keys = {slot: slot for slot in range(3)}
    for number, (slot, action) in enumerate(actions):
        if action == "restart":
            totals.update(keys[slot], sent(processes[slot]))
            alone.running.dec(processes[slot].running.value)
            totals.end(keys[slot])
            processes[slot], keys[slot] = FrontendMetrics(InstrumentRegistry()), 100 + number
        act(processes[slot], action, number)
        act(alone, action, number)
    for slot, process in processes.items():
        totals.update(keys[slot], sent(process))
    merged = CollectorRegistry()
    merged.register(totals)
    assert sorted(values(merged)) == sorted(values(alone.registry))


def test_no_counter_falls_when_a_process_ends_and_another_begins() -> None:
    totals = MetricTotals()
    merged = CollectorRegistry()
    merged.register(totals)
    seen = [0.0]
    for life in range(4):
        metrics = FrontendMetrics(InstrumentRegistry())
        for _ in range(3):
            metrics.generation_tokens.value += life + 1
            totals.update(life, sent(metrics))
            seen.append(merged.get_sample_value("tandem_frontend_generation_tokens_total") or 0.0)
        totals.end(life)
        seen.append(merged.get_sample_value("tandem_frontend_generation_tokens_total") or 0.0)
    assert seen == sorted(seen)
    assert seen[-1] == 3 * (1 + 2 + 3 + 4)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_no_sum_falls_by_its_last_bit_in_whatever_order_processes_end(seconds: list[float], random: Random) -> None:
    totals = MetricTotals()
    merged = CollectorRegistry()
    merged.register(totals)
    for process, value in enumerate(seconds):
        metrics = FrontendMetrics(InstrumentRegistry())
        metrics.inter_token.observe(value)
        totals.update(process, sent(metrics))
    name = "tandem_inter_token_latency_seconds_sum"
    before = merged.get_sample_value(name)
    assert before is not None and abs(before - sum(seconds)) < 1e-5
    for process in random.sample(range(len(seconds)), len(seconds)):
        totals.end(process)
        assert merged.get_sample_value(name) == before


def test_a_process_that_was_never_heard_of_may_end() -> None:
    totals = MetricTotals()
    totals.end(7)
    assert list(totals.collect()) == []


def test_a_report_has_its_layout_only_if_that_is_new() -> None:
    metrics = FrontendMetrics(InstrumentRegistry())
    first = sent(metrics)
    metrics.inter_token.observe(0.5)
    metrics.running.inc()
    second = sent(metrics)
    metrics.aborts.labels("disconnect").inc()
    third = sent(metrics)
    assert first.layout is not None and second.layout is None and third.layout is not None
    assert len(first.values) == len(second.values) == len(third.values) - 1
    assert [family.name for family in families_of(third.layout, third.values)] == [
        instrument.name for instrument in first.layout
    ]


def test_the_series_of_a_report_are_those_of_the_registry() -> None:
    metrics = FrontendMetrics(InstrumentRegistry())
    for number, action in enumerate(("request", "error", "token", "open") * 3):
        act(metrics, action, number)
    metrics.ends.end("/v1/completions", 0.25, [("parse", 0.125), ("tokenize", 0.0)], "bodies")
    metrics.link.connected.set(1)
    metrics.connections.open.set_function(lambda: 7)
    totals = MetricTotals()
    totals.update("process", sent(metrics))
    merged = CollectorRegistry()
    merged.register(totals)
    assert list(values(merged)) == list(values(metrics.registry))
    assert merged.get_sample_value("tandem_frontend_num_connections") == 7.0
    labels = {"route": "/v1/completions", "le": "0.5"}
    assert merged.get_sample_value("tandem_http_request_duration_seconds_bucket", labels) == 1.0


def test_a_process_that_ended_before_its_successor_was_heard_of_keeps_its_counters_and_no_gauge_but_0() -> None:
    totals = MetricTotals()
    metrics = FrontendMetrics(InstrumentRegistry())
    totals.update(1, sent(metrics))
    metrics.requests.labels("/v1/completions", "200").inc(5)
    totals.update(1, sent(metrics))
    metrics.requests.labels("/v1/completions", "200").inc(5)
    totals.update(1, sent(metrics))
    totals.end(1)
    merged = CollectorRegistry()
    merged.register(totals)
    labels = {"route": "/v1/completions", "status": "200"}
    assert merged.get_sample_value("tandem_http_requests_total", labels) == 10.0
    assert merged.get_sample_value("tandem_frontend_num_requests_running") == 0.0
