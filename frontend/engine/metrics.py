"""The engine's own numbers as Prometheus metrics, read from its heartbeat when they are asked for."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tandem.frontend.engine.health import EngineWatch
from tandem.protocol.events import EngineStats, Histogram, Phase

_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "tandem_num_requests_running": ("Sequences that hold a row.", lambda stats: stats.running),
    "tandem_num_requests_waiting": ("Requests that wait for a row or pages.", lambda stats: stats.waiting),
    "tandem_num_rows": ("Rows there are.", lambda stats: stats.rows_total),
    "tandem_kv_cache_usage_perc": (
        "Part of the KV pages that requests and sessions hold; 1 is all of them.",
        lambda stats: stats.pages_used / stats.pages_total if stats.pages_total else 0.0,
    ),
    "tandem_kv_cache_pages": ("KV pages there are.", lambda stats: stats.pages_total),
    "tandem_kv_cache_cached_pages": ("KV pages in the prefix cache, in use or not.", lambda stats: stats.pages_cached),
    "tandem_num_sessions": ("Sessions that keep their KV.", lambda stats: stats.sessions),
    "tandem_steps_in_flight": ("Steps launched and not committed.", lambda stats: stats.steps_in_flight),
    "tandem_oldest_wait_seconds": ("How long the oldest waiting request waits.", lambda stats: stats.oldest_wait),
}

_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "tandem_prompt_tokens": ("Prompt tokens taken in.", lambda stats: stats.prompt_tokens),
    "tandem_generation_tokens": ("Tokens generated.", lambda stats: stats.generation_tokens),
    "tandem_requests_accepted": ("Requests accepted.", lambda stats: stats.requests_accepted),
    "tandem_engine_steps_launched": ("Steps launched.", lambda stats: stats.steps_launched),
    "tandem_engine_steps_committed": ("Steps committed.", lambda stats: stats.steps_committed),
    "tandem_prefix_cache_queries": (
        "Prompt tokens looked for in the prefix cache.",
        lambda stats: stats.prefix_queries,
    ),
    "tandem_prefix_cache_hits": ("Prompt tokens found in the prefix cache.", lambda stats: stats.prefix_hits),
    "tandem_kv_cache_evicted_pages": ("Pages that left the prefix cache.", lambda stats: stats.pages_evicted),
    "tandem_num_preemptions": ("Times a running request gave up its pages.", lambda stats: stats.preemptions),
    "tandem_sessions_evicted": (
        "Sessions that ended for lack of memory or room.",
        lambda stats: stats.sessions_evicted,
    ),
    "tandem_zombie_rows": ("Rows computed for sequences that had ended.", lambda stats: stats.zombie_rows),
    "tandem_gpu_busy_seconds": (
        "Time in timed steps (a sample) that the GPU worked.",
        lambda stats: stats.gpu_busy_seconds,
    ),
    "tandem_gpu_idle_seconds": (
        "Time between a timed step and the next that the GPU waited for the CPU.",
        lambda stats: stats.gpu_idle_seconds,
    ),
    "tandem_gpu_timed_steps": ("Steps that were timed on the GPU.", lambda stats: stats.gpu_timed_steps),
    "tandem_requests_constrained": ("Requests that follow a grammar.", lambda stats: stats.requests_constrained),
    "tandem_mask_rows": ("Rows of steps whose sampling was masked by a grammar.", lambda stats: stats.mask_rows),
    "tandem_mask_seconds": ("Wall time of filling those masks.", lambda stats: stats.mask_seconds),
}

_LABELLED: dict[str, tuple[str, str, Callable[[EngineStats], Mapping[str, float]]]] = {
    "tandem_request_success": ("Requests ended well.", "finished_reason", lambda stats: stats.requests_finished),
    "tandem_request_failed": ("Requests ended in an error.", "code", lambda stats: stats.requests_failed),
    "tandem_engine_stage_seconds": (
        "Wall time of the engine's loop by stage; collect is the wait for the device.",
        "stage",
        lambda stats: stats.stage_seconds,
    ),
}

_HISTOGRAMS: dict[str, tuple[str, Callable[[EngineStats], Histogram]]] = {
    "tandem_request_queue_time_seconds": ("From arrival to a row.", lambda stats: stats.queue_time),
    "tandem_engine_step_rows": ("Rows of a step.", lambda stats: stats.step_rows),
    "tandem_grammar_compile_time_seconds": (
        "Compilation of grammars that were not cached.",
        lambda stats: stats.compile_time,
    ),
}


class EngineCollector(Collector):
    """Prometheus collector of one engine; before its first heartbeat it reports only that the engine is not up.

    `restarts` returns how often the engine's process was started again.
    """

    def __init__(self, watch: EngineWatch, restarts: Callable[[], int]) -> None:
        self._watch = watch
        self._restarts = restarts

    def collect(self) -> Iterable[Metric]:
        yield from self._life()
        if (heartbeat := self._watch.heartbeat) is not None:
            yield from stats_metrics(heartbeat.stats)

    def _life(self) -> Iterator[Metric]:
        heartbeat, health = self._watch.heartbeat, self._watch.health()
        up = heartbeat is not None and health.status not in ("silent", "failed")
        yield GaugeMetricFamily("tandem_engine_up", "1 while the engine's heartbeat is heard.", float(up))
        yield GaugeMetricFamily("tandem_engine_ready", "1 while the engine accepts requests.", float(health.ready))
        yield CounterMetricFamily("tandem_engine_restarts", "Restarts of the engine's process.", self._restarts())
        phases = GaugeMetricFamily("tandem_engine_phase", "1 for the phase that the engine is in.", labels=["phase"])
        for phase in Phase:
            phases.add_metric([phase.value], float(heartbeat is not None and heartbeat.phase is phase))
        yield phases
        if heartbeat is not None:
            name = "tandem_engine_seconds_since_last_beat"
            yield GaugeMetricFamily(name, "Age of the last heartbeat.", self._watch.silence())
            text = "Requests that the engine has accepted and not finished."
            yield GaugeMetricFamily("tandem_engine_pending", text, heartbeat.pending)


def stats_metrics(stats: EngineStats) -> Iterator[Metric]:
    """One family for each number of the engine."""
    for name, (text, read) in _GAUGES.items():
        yield GaugeMetricFamily(name, text, read(stats))
    for name, (text, read) in _COUNTERS.items():
        yield CounterMetricFamily(name, text, read(stats))
    for name, (text, label, read_all) in _LABELLED.items():
        family = CounterMetricFamily(name, text, labels=[label])
        for key, value in read_all(stats).items():
            family.add_metric([key], value)
        yield family
    for name, (text, read_histogram) in _HISTOGRAMS.items():
        histogram = read_histogram(stats)
        yield HistogramMetricFamily(name, text, buckets=_cumulative(histogram), sum_value=histogram.total)


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """Prometheus counts in a bucket all that is below its bound."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
