"""Time for which a frontend's metrics report blocks its event loop.

    python -m benchmarks.frontends.bench_report [--routes 6] [--keys 4] [--reports 300] [--save NAME]

The frontend has answered requests of `--routes` routes with four statuses each for `--keys` API keys, so that no series
is new. "report" encodes the values of all instruments; "first" also the layout, which is needed when a series is new;
"families" uses prometheus_client's metrics, for comparison. All are CPU times in microseconds. The limit is 300 us per
report.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable

import msgspec

from benchmarks.measuring.results import save
from tandem.frontend.cli.bench.distribution import percentile
from tandem.frontend.control_channel import Metrics
from tandem.frontend.metrics.families import snapshot
from tandem.frontend.metrics.frontend_metrics import FrontendMetrics
from tandem.frontend.metrics.instruments import InstrumentRegistry
from tandem.frontend.metrics.key_metrics import KeyUsage
from tandem.frontend.metrics.processes import GarbageCollector
from tandem.frontend.metrics.reports import Report
from tandem.frontend.server.paths import ROUTE_RIGHTS

STATUSES = ("200", "400", "429", "503")
STAGES = (("parse", 0.0003), ("render", 0.0004), ("tokenize", 0.0002))


def used_metrics(routes: int, keys: int) -> FrontendMetrics:
    """Return the metrics of a frontend that has served requests."""
    metrics = FrontendMetrics(InstrumentRegistry())
    metrics.registry.register(GarbageCollector("frontend-0"))
    for route, status in itertools.product(list(ROUTE_RIGHTS)[:routes], STATUSES):
        metrics.requests.labels(route, status).inc(1000)
        metrics.ends.end(route, 0.0123, STAGES, "concurrency" if status == "429" else None)
    for number in range(10_000):
        metrics.inter_token.observe(number / 1e6)
    for number in range(keys):
        metrics.keys.begin(KeyUsage(f"key-{number}", 100, lambda: 0), True)
    return metrics


def times(work: Callable[[], object], number: int) -> dict[str, float]:
    """Return percentiles of the CPU time of a function."""
    taken = []
    for _ in range(number):
        begun = time.thread_time_ns()
        work()
        taken.append((time.thread_time_ns() - begun) / 1e3)
    return {f"p{percent}": round(percentile(sorted(taken), percent), 1) for percent in (50, 90, 99)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routes", type=int, default=6, help="routes with requests (default: 6)")
    parser.add_argument("--keys", type=int, default=4, help="API keys with requests (default: 4)")
    parser.add_argument("--reports", type=int, default=300, help="reports to measure (default: 300)")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args(argv)
    metrics = used_metrics(arguments.routes, arguments.keys)
    registry, encoder = metrics.registry, msgspec.json.Encoder()
    first = Metrics(registry.report())

    def with_layout() -> bytes:
        return encoder.encode(Metrics(registry.report(with_layout=True)))

    figures = {
        "values": len(first.report.values),
        "report": times(lambda: encoder.encode(Metrics(registry.report())), arguments.reports),
        "first": times(with_layout, arguments.reports),
        "families": times(lambda: encoder.encode(Metrics(Report(others=snapshot(registry)))), arguments.reports),
        "bytes": {
            "report": len(encoder.encode(Metrics(registry.report()))),
            "first": len(encoder.encode(first)),
            "families": len(encoder.encode(Metrics(Report(others=snapshot(registry))))),
        },
    }
    for name, figure in figures.items():
        print(f"{name}: {figure}")
    if arguments.save:
        config = {name: value for name, value in vars(arguments).items() if name != "save"}
        print(save(arguments.save, config, figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
