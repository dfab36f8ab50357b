"""Memory, CPU time, open files and garbage collections of processes."""

import gc
from collections.abc import Callable, Iterable

from msgspec import structs
from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tandem.frontend.metrics.families import Family, Sample, added, metrics_of, rounded, snapshot

_CPU = "process_cpu_seconds"


class ProcessesCollector(Collector):
    """Collector of the resource usage of processes on this host.

    running: returns the name, used as label `process`, and id of each process. Processes with the same name, such as a
    frontend and its successor, are summed. CPU time of exited processes stays in the counter, as of the last scrape.
    """

    def __init__(self, running: Callable[[], Iterable[tuple[str, int]]]) -> None:
        self._running = running
        self._seen: dict[tuple[str, int], float] = {}
        """CPU seconds of each process at the last scrape."""
        self._ended: dict[str, float] = {}
        """CPU seconds of exited processes, by name."""

    def collect(self) -> Iterable[Metric]:
        found = {process: self._families(*process) for process in self._running()}
        cpu = {process: _cpu_seconds(families) for process, families in found.items() if families}
        for (name, pid), seconds in self._seen.items():
            if (name, pid) not in cpu:
                self._ended[name] = self._ended.get(name, 0.0) + seconds
        self._seen = cpu
        ended = [
            Family(_CPU, "", "counter", (Sample(f"{_CPU}_total", (("process", name),), seconds),))
            for name, seconds in self._ended.items()
        ]
        return metrics_of(added([*(family for families in found.values() for family in families), *ended]))

    def _families(self, name: str, pid: int) -> list[Family]:
        """Return the metrics of a process; none if it has exited."""
        labels = (("process", name),)
        families = [
            structs.replace(
                family, samples=tuple([structs.replace(sample, labels=labels) for sample in family.samples])
            )
            for family in snapshot(ProcessCollector(pid=lambda: pid, registry=None))
        ]
        return [rounded(family) if family.name == _CPU else family for family in families]


class GarbageCollector(Collector):
    """Collector of the garbage collections of this process, with the label `process`."""

    def __init__(self, process: str) -> None:
        self._process = process

    def collect(self) -> Iterable[Metric]:
        for name, key, text in (
            ("objects_collected", "collected", "Objects collected during garbage collection."),
            ("objects_uncollectable", "uncollectable", "Uncollectable objects found during garbage collection."),
            ("collections", "collections", "Number of times that this generation was collected."),
        ):
            family = CounterMetricFamily(f"python_gc_{name}", text, labels=["process", "generation"])
            for generation, stats in enumerate(gc.get_stats()):
                family.add_metric([self._process, str(generation)], stats[key])
            yield family


def _cpu_seconds(families: Iterable[Family]) -> float:
    return sum([sample.value for family in families if family.name == _CPU for sample in family.samples])
