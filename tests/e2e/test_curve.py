"""An engine and a frontend on a tcp endpoint, with keys."""

import contextlib
import shutil
from pathlib import Path

import psutil
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


@pytest.mark.slow
def test_a_frontends_key_is_rotated_by_replacing_its_processes(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_curve(keys)
    old, folder = make_client(keys, "web")
    _, new_folder = make_client(keys, "web-2")
    with keyed_serving(tmp_path, free_ports(2)) as serving, serving.clients() as client:
        shutil.copy(new_folder / "client.key_secret", folder / "client.key_secret")
        first = frontend_processes()
        for process in first.values():
            process.terminate()
        until(lambda: not first.keys() & frontend_processes().keys(), "the end of those with the old key")
        old.rename(old.with_suffix(".away"))
        until(lambda: serving.said("of frontend web was removed"), "the engine's line")
        until(serving.ready, "readiness")
        streams = client.open(completion(5), 5)
        client.until_ended(streams)
        assert Summary.of(streams) == Summary(done=5, error=0, cut=0, open=0, problems=0), summary(streams)
        assert not serving.said("refused a frontend from 127.0.0.1")


def frontend_processes() -> dict[int, psutil.Process]:
    """Return the frontends of this test's supervisors, by process id."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "--slot" in process.cmdline():
                found[process.pid] = process
    return found
