"""Resources of processes as metrics: what stays of processes that have ended."""

import itertools
from collections.abc import Callable, Iterable

import pytest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from tandem.frontend.metrics.processes import ProcessesCollector

CPU = {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.7}
"""CPU time by process id. Sums of these floats depend on their order."""


class Usage:
    """Stands for prometheus_client's collector of one process."""

    def __init__(self, pid: Callable[[], int], registry: None) -> None:
        self._pid = pid()

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily("process_cpu_seconds", "CPU time.", value=CPU[self._pid])


def test_cpu_time_never_falls_in_whatever_order_processes_of_one_name_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.frontend.metrics.processes.ProcessCollector", Usage)
    for order in itertools.permutations(CPU):
        running = [("frontend-1", pid) for pid in CPU]
        collector = ProcessesCollector(lambda running=running: running)  # type: ignore[misc]
        seen = []
        for pid in order:
            seen += [sample.value for metric in collector.collect() for sample in metric.samples]
            running.remove(("frontend-1", pid))
        seen += [sample.value for metric in collector.collect() for sample in metric.samples]
        assert seen == [seen[0]] * 5 and seen[0] == pytest.approx(1.3, abs=1e-5), order
