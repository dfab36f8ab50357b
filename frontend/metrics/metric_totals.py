"""Sums of the Prometheus metrics of several processes, of which some have ended."""

from collections.abc import Hashable, Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tandem.frontend.metrics.families import Family, added, metrics_of


class MetricTotals(Collector):
    """Collector of the sums over processes.

    The counters and histograms of a process that has ended stay in the sums, so that no counter falls. A gauge is the
    sum over the processes that run.
    """

    def __init__(self) -> None:
        self.model_name = ""
        """Name of the model that a process told last; "" before."""
        self._running: dict[Hashable, tuple[Family, ...]] = {}
        self._ended: tuple[Family, ...] = ()

    def update(self, process: Hashable, families: tuple[Family, ...]) -> None:
        """Replace what is known of a process by its newest values."""
        self._running[process] = families

    def end(self, process: Hashable) -> None:
        """Keep the counters and histograms of a process that has ended.

        Its gauges are forgotten.
        """
        lasting = (family for family in self._running.pop(process, ()) if family.kind != "gauge")
        self._ended = tuple(added([*self._ended, *lasting]))

    def collect(self) -> Iterable[Metric]:
        running = (family for families in self._running.values() for family in families)
        yield from metrics_of(added([*self._ended, *running]))
