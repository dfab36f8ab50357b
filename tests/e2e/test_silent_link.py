"""A frontend on another host whose link falls silent without an end: a cable pulled, a host that is gone.

Meanwhile both sides answer scrapes.
"""

from pathlib import Path

import pytest

from tests.fakes.scripted_engine import Script
from tests.support.remote_engine import remote_engine
from tests.support.scraper import Scraper
from tests.support.serving import until
from tests.support.stream_client import Summary, completion, summary
from tests.support.tcp_proxy import SilentProxy, free_ports


@pytest.mark.slow
def test_silent_link_frees_rows_and_ends_streams_and_comes_back(tmp_path: Path) -> None:
    endpoint = free_ports(2)
    script = Script(tokens_per_second=30.0)
    with SilentProxy(endpoint) as proxy, remote_engine(tmp_path / "log", endpoint, proxy.port, script) as remote:
        # Each command has metrics of its own.
        with remote.clients() as client, Scraper(remote.port), Scraper(remote.ops_port):
            streams = client.open(completion(2000), 20)
            client.until_streaming(streams)
            assert remote.running() == 20
            proxy.silence()
            client.until(lambda: remote.running() == 0, "rows of the silent frontend")
            client.until_ended(streams)
            assert Summary.of(streams) == Summary(done=0, error=20, cut=0, open=0, problems=0), summary(streams)
            proxy.resume()
            until(remote.ready, "the link")
            later = client.open(completion(10), 20)
            client.until_ended(later)
            assert Summary.of(later).done == 20, summary(later)
        until(remote.rows_and_pages_are_free, "no rows and pages in use")
