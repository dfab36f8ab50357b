"""Silence on the link between a frontend and an engine on another host."""

from pathlib import Path

from benchmarks.frontends.drill import Drill, Outcome, Setup
from tests.fakes.scripted_engine import Script
from tests.support.remote_engine import remote_engine
from tests.support.stream_client import StreamClient
from tests.support.tcp_proxy import SilentProxy, free_ports


def measure_silence(setup: Setup, folder: Path) -> Outcome:
    """Measure how long a frontend that fell silent keeps its rows.

    A proxy between it and the engine lets nothing pass.
    """
    endpoint = free_ports(2)
    script = Script(tokens_per_second=setup.tokens_per_second)
    with (
        SilentProxy(endpoint) as proxy,
        remote_engine(folder / "log", endpoint, proxy.port, script) as remote,
        StreamClient(remote.address) as client,
    ):
        drill = Drill(remote, client, setup)
        streams = drill.load()
        drill.await_rows(len(streams))
        drill.strike(proxy.silence)
        drill.note("rows free", lambda: remote.engine_metric("tandem_num_requests_running") == 0)
        drill.note_ends(streams)
        proxy.resume()
        drill.note("ready after the link came back", drill.is_ready)
        drill.count(streams, "streams")
        return drill.outcome("a link that goes silent", "rows free in 6 s")
