"""Frontend CPU per token and request, and added latency.

    python -m benchmarks.bench_frontend [--streams 1 64 256 1024 2048] [--frontends 1 2 4 8] [--seconds 5]
        [--tokens-per-second R] [--stream-interval-ms N] [--compare TREE] [--rounds 3] [--save NAME]

The engine is scripted: it uses real sockets and messages, and sends tokens at a given rate, a token per stream in each
step. By default a stream gets 6,400 tokens a second divided by the number of streams, between 5 and 200. The clients
run in separate processes.

CPU is the user and kernel time of all frontend processes and their supervisor. The delay of a token runs from the
engine's send to the client's read. TTFT excludes the engine's time. TTFT and /health/live on new connections, which
shows the delay of the event loop, are sampled 20 times a second during the load.

With --compare, measurements alternate with another checkout's frontends, using the engine and clients of this one, and
the ratio of the medians is shown.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from pathlib import Path

from msgspec import Struct, to_builtins

from benchmarks.frontends.deployment import ROOT, Deployment, git_hash
from benchmarks.frontends.load import BODIES, Arrivals, Probes, RequestLoad, Share, StreamLoad, probe
from benchmarks.measuring.results import save
from tandem.frontend.cli.bench.distribution import percentile
from tests.fakes.scripted_engine import Journal, Script

TOKENS_PER_SECOND, SLOWEST, FASTEST = 6400.0, 5.0, 200.0
"""Default tokens per second of all streams together, and minimum and maximum per stream."""
PROBED_SECONDS = 4.0
WARM_SECONDS = 1.0


class StreamFigures(Struct, frozen=True):
    """Figures of a load of streams; times are in milliseconds."""

    streams: int
    frontends: int
    tokens_per_second: float
    """Requested tokens per second of each stream."""
    received: float
    """Tokens per second received by all clients together."""
    cpu_us: float
    """Frontend CPU per token, in microseconds."""
    cpu_cores: float
    engine_cores: float
    client_cores: float
    """CPU usage of the clients, which limit the figures if it nears their cores."""
    delay_p50: float
    delay_p99: float
    """Delay from the engine's send to the client's read."""
    itl_p50: float
    itl_p99: float
    engine_itl_p50: float
    engine_itl_p99: float
    ttft_p50: float
    ttft_p99: float
    """TTFT without the engine's time."""
    live_p50: float
    live_p99: float
    live_max: float
    """Latency of /health/live on a new connection."""


class RequestFigures(Struct, frozen=True):
    """Figures of a kind of request."""

    kind: str
    frontends: int
    cpu_us: float
    """Frontend CPU per request, in microseconds."""
    per_second: float
    cpu_cores: float
    connections: int
    """Connections that each send one request after another."""


def rate_of(streams: int, asked: float | None) -> float:
    """Return the tokens per second of a stream."""
    return min(max(TOKENS_PER_SECOND / streams, SLOWEST), FASTEST) if asked is None else asked


def measure_streams(
    tree: Path, streams: int, frontends: int, rate: float, seconds: float, clients: int, flags: tuple[str, ...]
) -> StreamFigures:
    """Measure CPU over `seconds`, then latencies under the same load."""
    with Deployment(tree, Script(rate), frontends, flags) as server:
        load = StreamLoad(server.address, streams, clients)
        load.await_start()
        time.sleep(WARM_SECONDS)
        load.mark()
        started, cpu, engine = time.monotonic(), server.cpu(), server.engine_cpu()
        time.sleep(seconds)
        cpu, engine, taken = server.cpu() - cpu, server.engine_cpu() - engine, time.monotonic() - started
        load.mark()
        probes = probe(server.address, PROBED_SECONDS)
        load.mark()
        shares = load.shares()
    tokens = sum(share.tokens for share in shares)
    delays, gaps = delays_of(shares, server.journal)
    first = added_first(probes, server.journal)
    engine_gaps = _gaps_of_engine(server.journal, shares[0].started, taken)
    live = sorted(probes.live)
    return StreamFigures(
        streams,
        frontends,
        rate,
        received=round(tokens / taken, 1),
        cpu_us=round(cpu / max(tokens, 1) * 1e6, 2),
        cpu_cores=round(cpu / taken, 3),
        engine_cores=round(engine / taken, 3),
        client_cores=round(sum(share.cpu for share in shares) / taken, 3),
        delay_p50=_ms(delays, 50),
        delay_p99=_ms(delays, 99),
        itl_p50=_ms(gaps, 50),
        itl_p99=_ms(gaps, 99),
        engine_itl_p50=_ms(engine_gaps, 50),
        engine_itl_p99=_ms(engine_gaps, 99),
        ttft_p50=_ms(first, 50),
        ttft_p99=_ms(first, 99),
        live_p50=_ms(live, 50),
        live_p99=_ms(live, 99),
        live_max=_ms(live, 100),
    )


def measure_requests(
    tree: Path, kind: str, frontends: int, seconds: float, load: tuple[int, int], flags: tuple[str, ...]
) -> RequestFigures:
    """Measure the CPU of requests whose replies have one token.

    load: number of connections, each with one request at a time, and of client processes that share them.
    """
    with Deployment(tree, Script(0.0), frontends, flags) as server:
        warming = RequestLoad(server.address, kind, *load)
        time.sleep(WARM_SECONDS)
        warming.stop()
        cpu, started = server.cpu(), time.monotonic()
        measured = RequestLoad(server.address, kind, *load)
        time.sleep(seconds)
        done = measured.stop()
        cpu, taken = server.cpu() - cpu, time.monotonic() - started
    cores = round(cpu / taken, 2)
    return RequestFigures(kind, frontends, round(cpu / max(done, 1) * 1e6, 1), round(done / taken, 1), cores, load[0])


def delays_of(shares: list[Share], journal: Journal) -> tuple[list[float], list[float]]:
    """Return the delays of all tokens of the measured time, and the gaps between reads of a stream, ascending."""
    delays: list[float] = []
    gaps: list[float] = []
    for share in shares:
        for arrivals in share.arrivals:
            _add_delays(arrivals, share.started, journal, delays, gaps)
    return sorted(delays), sorted(gaps)


def _add_delays(arrivals: Arrivals, since: float, journal: Journal, delays: list[float], gaps: list[float]) -> None:
    sent = journal.sent
    step = journal.first[arrivals.request_id][0] - 1
    before = 0.0
    for time_read, count in zip(arrivals.times, arrivals.counts, strict=True):
        if time_read >= since:
            delays.extend([time_read - emitted for emitted in sent[step : step + count]])
            if before:
                gaps.append(time_read - before)
        before = time_read
        step += count


def added_first(probes: Probes, journal: Journal) -> list[float]:
    """Return the TTFTs without the engine's time, ascending."""
    added = []
    for request_id, opened, first in probes.first:
        of_engine = journal.sent[journal.first[request_id][0] - 1] - journal.arrived[request_id][0]
        added.append(first - opened - of_engine)
    return sorted(added)


def _gaps_of_engine(journal: Journal, since: float, seconds: float) -> list[float]:
    times = [sent for sent in journal.sent if since <= sent <= since + seconds]
    return sorted(after - before for before, after in itertools.pairwise(times))


def _ms(ordered: list[float], percent: float) -> float:
    return round(percentile(ordered, percent) * 1e3, 3) if ordered else 0.0


HEAD = (
    f"{'tree':8} {'streams':>7} {'frontends':>9} {'tokens/s':>9} {'us/token':>9} {'cores':>6} {'delay p50':>9} "
    f"{'p99':>8} {'ITL p99':>8} {'engine':>8} {'TTFT p50':>8} {'p99':>8} {'live p50':>8} {'p99':>8}"
)


def line(name: str, f: StreamFigures) -> str:
    """Format a row of the table."""
    return (
        f"{name:8} {f.streams:7} {f.frontends:9} {f.received:9.0f} {f.cpu_us:9.1f} {f.cpu_cores:6.2f} "
        f"{f.delay_p50:9.2f} {f.delay_p99:8.2f} {f.itl_p99:8.2f} {f.engine_itl_p99:8.2f} {f.ttft_p50:8.2f} "
        f"{f.ttft_p99:8.2f} {f.live_p50:8.2f} {f.live_p99:8.2f}"
    )


class Trees(Struct, frozen=True):
    """Checkouts to measure: this one and optionally another."""

    paths: dict[str, Path]
    rounds: int

    def names(self) -> list[str]:
        """Return the tree of each measurement, alternating."""
        return list(self.paths) * self.rounds

    def ratio(self, found: list[tuple[str, float]]) -> str:
        """Return the ratios of the first tree's median CPU to the second's."""
        if len(self.paths) == 1:
            return ""
        ours, other = [statistics.median([cpu for tree, cpu in found if tree == name]) for name in self.paths]
        return f"ratio of CPU, here / there: {ours / other:.3f} ({ours:.1f} / {other:.1f} us, medians of {self.rounds})"


def run(arguments: argparse.Namespace, trees: Trees) -> tuple[dict[str, list[object]], list[str]]:
    """Measure everything; return the figures and the ratios."""
    flags = dict.fromkeys(trees.paths, ())
    if arguments.stream_interval_ms:
        flags["here"] = ("--stream-interval-ms", f"{arguments.stream_interval_ms:g}")
    figures: dict[str, list[object]] = {"streams": [], "requests": []}
    ratios = []
    print(HEAD, flush=True)
    for frontends in arguments.frontends:
        for streams in arguments.streams:
            found = []
            for name in trees.names():
                rate = rate_of(streams, arguments.tokens_per_second)
                setup = (trees.paths[name], streams, frontends, rate, arguments.seconds, arguments.clients)
                measured = measure_streams(*setup, flags[name])
                print(line(name, measured), flush=True)
                found.append((name, measured.cpu_us))
                figures["streams"].append({"tree": name} | to_builtins(measured))
            ratios.append(f"{streams} streams, {frontends} frontends: {trees.ratio(found)}")
        for kind in arguments.requests:
            found = []
            for name in trees.names():
                request = measure_requests(
                    *(trees.paths[name], kind, frontends, arguments.seconds),
                    *((arguments.connections, arguments.clients), flags[name]),
                )
                print(
                    f"{name:8} {kind}, {frontends} frontends: {request.cpu_us:.0f} us of CPU, "
                    f"{request.per_second:.0f}/s, {request.cpu_cores:.2f} cores",
                    flush=True,
                )
                found.append((name, request.cpu_us))
                figures["requests"].append({"tree": name} | to_builtins(request))
            ratios.append(f"{kind}, {frontends} frontends: {trees.ratio(found)}")
    return figures, ratios if len(trees.paths) > 1 else []


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 64, 256, 1024, 2048])
    parser.add_argument(
        "--requests",
        nargs="*",
        choices=list(BODIES),
        default=list(BODIES),
        metavar="KIND",
        help=f"kinds of requests to measure: {', '.join(BODIES)} (default: all)",
    )
    parser.add_argument(
        "--connections",
        type=int,
        default=8,
        metavar="N",
        help="connections of a load of requests, each with one at a time (default: 8)",
    )
    parser.add_argument("--frontends", type=int, nargs="+", default=[1], metavar="N", help="processes (default: 1)")
    parser.add_argument("--tokens-per-second", type=float, metavar="R", help="of each stream; 0: as fast as possible")
    parser.add_argument(
        "--stream-interval-ms", type=float, default=0.0, metavar="N", help="flag of this tree's frontends"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="time over which CPU is measured (default: 5)")
    parser.add_argument(
        "--clients",
        type=int,
        default=max(1, min(4, (os.cpu_count() or 1) // 2)),
        metavar="N",
        help="client processes that hold the streams",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="TREE",
        help="another checkout whose `tandem frontend` has --frontends, measured in turns with this one",
    )
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each tree (default: 1)")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args(argv)
    paths = {"here": ROOT} | ({} if arguments.compare is None else {"there": arguments.compare.resolve()})
    figures, ratios = run(arguments, Trees(paths, arguments.rounds))
    print("\n".join(ratios))
    if arguments.save:
        config = {name: value for name, value in vars(arguments).items() if name not in ("compare", "save")}
        others = {name: git_hash(path) for name, path in paths.items() if path != ROOT}
        config |= {"trees": others, "cores": os.cpu_count()}
        print(save(arguments.save, config, figures | {"ratios": ratios}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
