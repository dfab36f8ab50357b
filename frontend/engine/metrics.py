"""Engine statistics as Prometheus metrics.

Each scrape reads them from the newest heartbeat.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_type_hints

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from tandem.frontend.engine.health import EngineWatch
from tandem.protocol.events import Phase
from tandem.protocol.stats import EngineStats, Histogram, Metric


def _declared_metrics() -> dict[str, Metric]:
    """Return the metrics that fields of `EngineStats` declare, by field name.

    Fields without a metric are left out.
    """
    hints = get_type_hints(EngineStats, include_extras=True)
    annotations = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: extra for name, extras in annotations.items() for extra in extras if isinstance(extra, Metric)}


_METRICS = _declared_metrics()


class EngineCollector(Collector):
    """Prometheus collector of one engine.

    Before the first heartbeat it reports only that the engine is not up. `restarts` returns how often the engine's
    process was started again.
    """

    def __init__(self, watch: EngineWatch, restarts: Callable[[], int]) -> None:
        self._watch = watch
        self._restarts = restarts

    def collect(self) -> Iterable[MetricFamily]:
        yield from self._life()
        if (heartbeat := self._watch.heartbeat) is not None:
            yield from stats_metrics(heartbeat.stats)

    def _life(self) -> Iterator[MetricFamily]:
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


def stats_metrics(stats: EngineStats) -> Iterator[MetricFamily]:
    """Yield the metric families of engine statistics.

    There is one for each metric that `EngineStats` declares, and the usage of the KV cache.
    """
    usage = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
    yield GaugeMetricFamily(
        "tandem_kv_cache_usage_perc", "Share of the KV pages that requests and sessions hold; 1 is all of them.", usage
    )
    for name, metric in _METRICS.items():
        yield _family(metric, getattr(stats, name))


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
    """Return the cumulative buckets of a histogram, as Prometheus defines them.

    Each bound comes with the number of all observations up to it.
    """
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
