"""Sums of the metrics of all frontends."""

from prometheus_client import CollectorRegistry, generate_latest

from tandem.frontend.control_channel import Metrics, Totals
from tandem.frontend.metric_totals import MetricTotals
from tandem.frontend.supervisor.frontends.frontend_process import FrontendProcess


class FrontendMetrics:
    """Keeper of the newest metrics of each process, which answers the scrapes of all.

    Whichever frontend a scrape reaches, it asks here for the sums.
    """

    def __init__(self) -> None:
        self._totals = MetricTotals()
        self._registry = CollectorRegistry()
        self._registry.register(self._totals)

    def hear(self, process: FrontendProcess, metrics: Metrics) -> None:
        """Record the metrics of a process, and answer if it asks for the sums."""
        self._totals.update(id(process), metrics.families)
        if metrics.scrape:
            process.child.send(Totals(metrics.scrape, generate_latest(self._registry).decode()))

    def end(self, process: FrontendProcess) -> None:
        """Keep what a process that has ended counted."""
        self._totals.end(id(process))
