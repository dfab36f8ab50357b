"""An engine and a frontend on a tcp endpoint, with keys."""

from pathlib import Path

import pytest

from tandem.protocol.curve import make_client, make_curve
from tests.support.remote_engine import keyed_serving
from tests.support.serving import until
from tests.support.stream_client import Summary, completion, summary
from tests.support.tcp_proxy import free_ports


@pytest.mark.slow
def test_a_frontend_is_cut_off_while_its_key_is_away(tmp_path: Path) -> None:
    make_curve(tmp_path / "keys")
    key, _ = make_client(tmp_path / "keys", "web")
    with keyed_serving(tmp_path, free_ports(2)) as serving, serving.clients() as client:
        streams = client.open(completion(2000), 5)
        client.until_streaming(streams)
        key.rename(key.with_suffix(".away"))
        client.until_ended(streams)
        assert Summary.of(streams) == Summary(done=0, error=5, cut=0, open=0, problems=0), summary(streams)
        until(lambda: serving.said("refused a frontend from 127.0.0.1"), "the engine's line")
        until(lambda: serving.said("the engine refuses this frontend's key"), "the frontend's line")
        assert not serving.ready()
        key.with_suffix(".away").rename(key)
        until(serving.ready, "the frontend is let in again")
        later = client.open(completion(5), 5)
        client.until_ended(later)
        assert Summary.of(later).done == 5, summary(later)
        until(serving.rows_and_pages_are_free, "no rows and pages in use")
