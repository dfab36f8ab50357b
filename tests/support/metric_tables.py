"""Write the tables of metrics in frontend/METRICS.md from the instruments: `python -m tests.support.metric_tables`."""

import re
from collections.abc import Iterator
from pathlib import Path

from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.engine.metrics import HeartbeatCollector, LifeCollector
from tandem.frontend.metrics.families import Collected, Family, snapshot
from tandem.frontend.metrics.frontend_metrics import FrontendMetrics
from tandem.frontend.metrics.instruments import Instrument, InstrumentRegistry
from tandem.frontend.metrics.processes import GarbageCollector, ProcessesCollector
from tandem.frontend.metrics.vllm_names import VLLM_NAMES
from tandem.frontend.supervisor.exposition import BuildCollector
from tandem.frontend.supervisor.frontends.frontends import Frontends
from tandem.frontend.supervisor.frontends.stall_aware_clock import StallAwareClock
from tandem.frontend.supervisor.ops import FrontendCollector
from tandem.protocol.events import Heartbeat, Phase
from tandem.protocol.stats import EngineStats
from tests.fakes.clock import FakeClock
from tests.fakes.frontend_child import FakeFrontendChildren

PAGE = Path(__file__).parents[2] / "frontend" / "METRICS.md"
TABLE = re.compile(r"<!-- metrics: ([^>]+) -->\n(.*?)<!-- end -->", re.DOTALL)
HEAD = "| metric | type | labels | meaning | vLLM's name |\n| --- | --- | --- | --- | --- |\n"


class Row:
    """One metric of the page."""

    def __init__(self, family: Family, labels: tuple[str, ...]) -> None:
        self.family = family
        self.labels = labels

    def line(self) -> str:
        family, suffix = self.family, "_total" if self.family.kind == "counter" else ""
        names = (["`model_name`"] if family.name in VLLM_NAMES else []) + [f"`{label}`" for label in self.labels]
        aliases = ", ".join(f"`{name}{suffix}`" for name in VLLM_NAMES.get(family.name, ()))
        cells = (f"`{family.name}{suffix}`", family.kind, ", ".join(names), family.text, aliases)
        return "| " + " | ".join(cells) + " |"


def engine_sources() -> list[Collected]:
    stats = EngineStats(
        pages_total=1,
        requests_finished={"stop": 0},
        requests_failed={"overloaded": 0},
        stage_seconds={"plan": 0.0},
        lora_requests={"a": 0},
        max_loras=1,
    )
    watch = EngineWatch(5.0, 60.0)
    heartbeat = Heartbeat(1, Phase.READY, 100, "", 0, stats)
    watch.observe(heartbeat)
    return [LifeCollector(watch, lambda: {"exit": 0}), HeartbeatCollector(heartbeat)]


def supervisor_sources() -> list[Collected]:
    frontends = Frontends(1, FakeFrontendChildren(), 8.0, 25.0, StallAwareClock(FakeClock()))
    return [
        FrontendCollector(frontends),
        BuildCollector(),
        ProcessesCollector(lambda: [("supervisor", 1)]),
        GarbageCollector("supervisor"),
    ]


def _rows(sources: list[Collected]) -> Iterator[Row]:
    for source in sources:
        for family in snapshot(source):
            labels = sorted({label for sample in family.samples for label, _ in sample.labels} - {"le"})
            yield Row(family, tuple(labels))


def _instruments() -> Iterator[Row]:
    """Yield the instruments of a frontend; those with labels have no series before they count."""
    registry = InstrumentRegistry()
    FrontendMetrics(registry)
    for collector in list(registry._collector_to_names):
        labels = collector.label_names if isinstance(collector, Instrument) else ()
        for family in snapshot(collector):
            yield Row(family, tuple(labels))


def sections() -> dict[str, list[Row]]:
    """Return the metrics of the code by the title of their table."""
    return {
        "engine": list(_rows(engine_sources())),
        "frontends": list(_instruments()),
        "supervisor": list(_rows(supervisor_sources())),
    }


def render(title: str) -> str:
    """Render a table: first what vLLM has too, then the others, by name."""
    rows = sorted(sections()[title], key=lambda row: (row.family.name not in VLLM_NAMES, row.family.name))
    return HEAD + "".join(row.line() + "\n" for row in rows)


def written() -> list[tuple[str, str]]:
    """Return the titles and texts of the tables that the page holds."""
    return TABLE.findall(PAGE.read_text())


def main() -> None:
    """Replace every table by what the code says."""
    PAGE.write_text(TABLE.sub(lambda m: f"<!-- metrics: {m[1]} -->\n{render(m[1])}<!-- end -->", PAGE.read_text()))


if __name__ == "__main__":
    main()
