"""Silent links between a frontend and an engine on another host."""

from collections.abc import Callable
from pathlib import Path

from benchmarks.frontends.drill import Drill, Outcome, Setup
from benchmarks.frontends.namespace import Cable, DistantServing
from tests.fakes.scripted_engine import Script
from tests.support.remote_engine import SeparateServing, remote_engine
from tests.support.stream_client import StreamClient
from tests.support.tcp_proxy import SilentProxy, free_ports


def measure_silence(setup: Setup, folder: Path) -> Outcome:
    """Measure how long the engine keeps the rows of a frontend after a proxy between them drops everything."""
    endpoint = free_ports(2)
    script = Script(tokens_per_second=setup.tokens_per_second)
    with SilentProxy(endpoint) as proxy, remote_engine(folder / "log", endpoint, proxy.port, script) as remote:
        return _measure(remote, setup, proxy.silence, proxy.resume, "a link that goes silent")


def measure_pulled_cable(setup: Setup, folder: Path) -> Outcome:
    """Measure the same with the engine's only network device down.

    No connection is closed and no packet acknowledged. Requires root and iproute2.
    """
    script = Script(tokens_per_second=setup.tokens_per_second)
    with Cable() as cable, DistantServing(folder / "log", cable, script) as remote:
        return _measure(remote, setup, cable.pull, cable.plug, "a cable that is pulled")


def _measure(
    remote: SeparateServing, setup: Setup, cut: Callable[[], None], mend: Callable[[], None], fault: str
) -> Outcome:
    with StreamClient(remote.address) as client:
        drill = Drill(remote, client, setup)
        streams = drill.load()
        drill.await_rows(len(streams))
        drill.strike(cut)
        drill.note("rows free", lambda: remote.engine_metric("tandem_num_requests_running") == 0)
        drill.note_ends(streams)
        mend()
        drill.note("ready after the link came back", drill.is_ready)
        drill.count(streams, "streams")
        return drill.outcome(fault, "rows free in 6 s")
