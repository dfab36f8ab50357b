"""Sums of metrics over processes equal those of one process that had done all the work."""

from collections.abc import Iterator
from random import Random

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tandem.frontend.metrics.families import Family, snapshot
from tandem.frontend.metrics.frontend_metrics import FrontendMetrics
from tandem.frontend.metrics.metric_totals import MetricTotals

ACTIONS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["request", "error", "token", "open", "restart"])), max_size=60
)


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
    alone = FrontendMetrics(CollectorRegistry())
    totals = MetricTotals()
    processes = {slot: FrontendMetrics(CollectorRegistry()) for slot in range(3)}
    keys = {slot: slot for slot in range(3)}
    for number, (slot, action) in enumerate(actions):
        if action == "restart":
            totals.update(keys[slot], snapshot(processes[slot].registry))
            alone.running.dec(processes[slot].running._value.get())
            totals.end(keys[slot])
            processes[slot], keys[slot] = FrontendMetrics(CollectorRegistry()), 100 + number
        act(processes[slot], action, number)
        act(alone, action, number)
    for slot, process in processes.items():
        totals.update(keys[slot], snapshot(process.registry))
    merged = CollectorRegistry()
    merged.register(totals)
    assert sorted(values(merged)) == sorted(values(alone.registry))


def test_no_counter_falls_when_a_process_ends_and_another_begins() -> None:
    totals = MetricTotals()
    merged = CollectorRegistry()
    merged.register(totals)
    seen = [0.0]
    for life in range(4):
        metrics = FrontendMetrics(CollectorRegistry())
        for _ in range(3):
            metrics.generation_tokens.value += life + 1
            totals.update(life, snapshot(metrics.registry))
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
        metrics = FrontendMetrics(CollectorRegistry())
        metrics.inter_token.observe(value)
        totals.update(process, snapshot(metrics.registry))
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


def test_a_snapshot_survives_the_wire_and_has_no_times_of_creation() -> None:
    metrics = FrontendMetrics(CollectorRegistry())
    metrics.aborts.labels("disconnect").inc()
    taken = snapshot(metrics.registry)
    assert msgspec.json.decode(msgspec.json.encode(taken), type=tuple[Family, ...]) == taken
    assert not [sample for family in taken for sample in family.samples if "created" in sample.name]
