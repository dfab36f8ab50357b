"""Metrics of a supervisor and all its processes."""

import os
import platform
from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tandem.frontend.engine.metrics import LifeCollector
from tandem.frontend.metrics.exposition import Exposition
from tandem.frontend.metrics.families import Collected
from tandem.frontend.metrics.processes import GarbageCollector, ProcessesCollector
from tandem.frontend.supervisor.frontends.frontends import Frontends
from tandem.frontend.supervisor.ops import FrontendCollector
from tandem.frontend.supervisor.supervised_engine import SupervisedEngine
from tandem.protocol.version import PROTOCOL_VERSION, distribution_version

_OWN_NAME = "supervisor"


class BuildCollector(Collector):
    """Collector of the versions of this installation."""

    def collect(self) -> Iterable[Metric]:
        labels = ["version", "protocol", "python"]
        family = GaugeMetricFamily("tandem_build_info", "1; the labels are versions.", labels=labels)
        family.add_metric([distribution_version(), str(PROTOCOL_VERSION), platform.python_version()], 1.0)
        yield family


def supervisor_exposition(
    engine: SupervisedEngine | None, frontends: Frontends | None, model_name: str, has_vllm_names: bool
) -> Exposition:
    """Build the metrics served on the ops port and by every frontend.

    model_name: used until a frontend reports the engine's model name.
    """

    def running() -> Iterator[tuple[str, int]]:
        yield _OWN_NAME, os.getpid()
        if engine is not None and engine.pid is not None:
            yield "engine", engine.pid
        for slot in frontends.slots if frontends is not None else ():
            for process in slot.processes:
                if process.child.pid is not None:
                    yield slot.name, process.child.pid

    def model_label() -> str:
        return (frontends.metrics.model_name if frontends is not None else "") or model_name

    sources: list[Collected] = []
    if engine is not None:
        watch, restarts = engine.watch, engine.restarts
        sources += [LifeCollector(watch, lambda: restarts), engine.totals]
    if frontends is not None:
        sources += [FrontendCollector(frontends), frontends.metrics]
    sources += [BuildCollector(), ProcessesCollector(running), GarbageCollector(_OWN_NAME)]
    exposition = Exposition(sources, model_label, has_vllm_names)
    if frontends is not None:
        frontends.exposition = exposition
    return exposition
