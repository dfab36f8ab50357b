"""Engine statistics as Prometheus metrics.

Each scrape reads them from the last heartbeat.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_type_hints

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.metrics.families import snapshot
from tandem.frontend.metrics.metric_totals import MetricTotals
from tandem.frontend.metrics.reports import Report
from tandem.protocol.events import Heartbeat, Phase
from tandem.protocol.stats import EngineStats, Histogram, Metric


def _declared_metrics() -> dict[str, Metric]:
    """Return the metrics declared by fields of `EngineStats`, by field name.

    Fields without a metric are skipped.
    """
    hints = get_type_hints(EngineStats, include_extras=True)
    annotations = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: extra for name, extras in annotations.items() for extra in extras if isinstance(extra, Metric)}


_METRICS = _declared_metrics()


class EngineTotals(Collector):
    """Collector of an engine's statistics over all its epochs.

    Counters and histograms continue across restarts. While the engine is away all values are kept; before the first
    heartbeat there are none.
    """

    def __init__(self) -> None:
        self._totals = MetricTotals()
        self._newest: Heartbeat | None = None
        self._ended_epoch: int | None = None

    def observe(self, heartbeat: Heartbeat) -> None:
        """Record a heartbeat, even of an engine that is known to have exited."""
        if heartbeat.engine_epoch == self._ended_epoch:
            return
        newest, self._newest = self._newest, heartbeat
        if newest is not None and newest.engine_epoch != heartbeat.engine_epoch:
            self._ended_epoch = newest.engine_epoch
            self._update(newest)
            self._totals.end(newest.engine_epoch)

    def collect(self) -> Iterable[MetricFamily]:
        if self._newest is not None:
            self._update(self._newest)
        return self._totals.collect()

    def _update(self, heartbeat: Heartbeat) -> None:
        self._totals.update(heartbeat.engine_epoch, Report(others=snapshot(HeartbeatCollector(heartbeat))))


class LifeCollector(Collector):
    """Collector of the engine's liveness, as seen by its supervisor.

    restarts: returns the number of restarts of the engine's process, by reason.
    """

    def __init__(self, watch: EngineWatch, restarts: Callable[[], Mapping[str, int]]) -> None:
        self._watch = watch
        self._restarts = restarts

    def collect(self) -> Iterable[MetricFamily]:
        heartbeat, health = self._watch.heartbeat, self._watch.health()
        up = heartbeat is not None and health.status not in ("silent", "failed")
        yield GaugeMetricFamily("tandem_engine_up", "1 while the engine's heartbeat is heard.", float(up))
        yield GaugeMetricFamily("tandem_engine_ready", "1 while the engine accepts requests.", float(health.ready))
        text = (
            "Restarts of the engine's process: `exit` if it ended by itself or was killed by others, `hang` if its "
            "supervisor killed it."
        )
        restarts = CounterMetricFamily("tandem_engine_restarts", text, labels=["reason"])
        for reason, count in self._restarts().items():
            restarts.add_metric([reason], count)
        yield restarts
        phases = GaugeMetricFamily("tandem_engine_phase", "1 for the phase that the engine is in.", labels=["phase"])
        for phase in Phase:
            phases.add_metric([phase.value], float(heartbeat is not None and heartbeat.phase is phase))
        yield phases
        if (age := self._watch.seconds_since_last_beat()) is not None:
            yield GaugeMetricFamily("tandem_engine_seconds_since_last_beat", "Age of the last heartbeat.", age)


class HeartbeatCollector(Collector):
    """Collector of the values of a heartbeat."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat

    def collect(self) -> Iterable[MetricFamily]:
        text = "Requests that the engine has accepted and not finished."
        yield GaugeMetricFamily("tandem_engine_pending", text, self._heartbeat.pending)
        yield from _stats_metrics(self._heartbeat.stats)


def _stats_metrics(stats: EngineStats) -> Iterator[MetricFamily]:
    """Yield the metric families of engine statistics.

    There is one for each metric declared in `EngineStats`, and some derived from several fields: usage and size of the
    KV cache.
    """
    text = (
        "1; the labels are the tokens of a KV page and the number of pages, over all KV groups. For models with "
        "windows their product is not the capacity in tokens, which the log and --check state."
    )
    size = GaugeMetricFamily("tandem_cache_config_info", text, labels=["block_size", "num_gpu_blocks"])
    if stats.pages_total:
        size.add_metric([str(stats.page_size), str(stats.pages_total)], 1.0)
    yield size
    if stats.max_loras:
        yield _adapters_info(stats)
    usage = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
    yield GaugeMetricFamily(
        "tandem_kv_cache_usage_perc", "Share of the KV pages that requests and sessions hold; 1 is all of them.", usage
    )
    for name, metric in _METRICS.items():
        yield _family(metric, getattr(stats, name))


def _adapters_info(stats: EngineStats) -> MetricFamily:
    """Return the adapters with requests in the form of vLLM, which routers read to find a server that has one."""
    text = (
        "Time in Unix seconds; the labels are the most adapters of a step, and the names of those with running and "
        "with waiting requests, separated by commas."
    )
    labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
    family = GaugeMetricFamily("tandem_lora_requests_info", text, labels=labels)
    waiting = [name for name, count in stats.lora_requests.items() if count > stats.lora_rows.get(name, 0)]
    family.add_metric([str(stats.max_loras), ",".join(stats.lora_rows), ",".join(waiting)], time.time())
    return family


def _family(metric: Metric, value: Any) -> MetricFamily:
    if metric.kind == "histogram":
        buckets = _cumulative(value)
        return HistogramMetricFamily(metric.name, metric.help, buckets=buckets, sum_value=value.total)
    family = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    if not metric.label:
        return family(metric.name, metric.help, value)
    labelled = family(metric.name, metric.help, labels=[metric.label])
    for key, number in value.items():
        labelled.add_metric([key], number)
    return labelled


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """Return the cumulative buckets of a histogram, as in Prometheus.

    Each upper bound has the number of observations up to it.
    """
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
