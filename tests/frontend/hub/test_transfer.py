"""Transfers of one file: cut, resumed, spoiled, refused and stopped."""

import errno
import os
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tandem.frontend.hub import transfer
from tandem.frontend.hub.client import RemoteFile
from tandem.frontend.hub.connections import open_connections
from tandem.frontend.hub.errors import HubError
from tandem.frontend.hub.progress import DownloadProgress
from tandem.frontend.hub.transfer import Source, StoppedError, Transfer
from tests.fakes.clock import FakeClock
from tests.fakes.hub_server import COMMIT, HubServer, digest_of, hub_server
from tests.support.hub_models import NAME, SINGLE, hub_model, repository

WEIGHTS = "model.safetensors"
CONTENT = SINGLE[WEIGHTS]
HALF = len(CONTENT) // 2


class Case:
    """One file of a fake hub, to be transferred any number of times."""

    def __init__(self, hub: HubServer, cache: Path, name: str = WEIGHTS) -> None:
        self.hub = hub
        self.model = hub_model(hub, cache)
        self.file = RemoteFile(name, len(SINGLE[name]), digest_of(SINGLE[name]))
        self.blob, self.partial = self.model.cache.blob(self.file.digest), self.model.cache.partial(self.file.digest)
        self.stop = threading.Event()
        self.waits: list[str] = []
        self.progress = DownloadProgress(1, self.file.size, FakeClock())

    def leave(self, content: bytes) -> None:
        """Leave the beginning of an earlier transfer."""
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        self.partial.write_bytes(content)

    def run(self) -> None:
        source = Source(self.model.url(self.file, COMMIT), {}, self.model.requested)
        with closing(open_connections(1)) as connections:
            Transfer(
                self.model.cache, self.file, source, connections, self.stop, self.progress, self.waits.append
            ).run()

    def ranges(self) -> list[str]:
        return [seen.range for seen in self.hub.bodies(self.file.name)]


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.setattr(transfer, "_FIRST_PAUSE", 0.001)
    with hub_server({NAME: repository()}) as hub:
        yield Case(hub, tmp_path)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_content_is_checked_and_named_by_its_hash(case: Case, tmp_path: Path, name: str) -> None:
    case = Case(case.hub, tmp_path, name)
    case.run()
    assert case.blob.read_bytes() == SINGLE[name]
    assert not case.partial.exists()
    assert case.progress.bytes_done == len(SINGLE[name])


def test_cut_connection_is_continued_where_it_was_cut(case: Case) -> None:
    case.hub.cuts[WEIGHTS] = [1000, 0, 5000]
    case.run()
    assert case.ranges() == ["", "bytes=1000-", "bytes=1000-", "bytes=6000-"]
    assert case.blob.read_bytes() == CONTENT
    assert case.progress.bytes_done == len(CONTENT)


def test_earlier_transfer_is_continued(case: Case) -> None:
    case.leave(CONTENT[:HALF])
    case.run()
    assert case.ranges() == [f"bytes={HALF}-"]
    assert case.blob.read_bytes() == CONTENT


def test_earlier_transfer_that_was_whole_is_only_checked(case: Case) -> None:
    case.leave(CONTENT)
    case.run()
    assert case.ranges() == []
    assert case.blob.read_bytes() == CONTENT


def test_server_without_ranges_sends_all_again(case: Case) -> None:
    case.hub.has_ranges = False
    case.leave(CONTENT[:HALF])
    case.run()
    assert case.blob.read_bytes() == CONTENT
    assert case.progress.bytes_done == len(CONTENT)


def test_rest_that_is_longer_than_the_file_is_thrown_away(case: Case) -> None:
    case.leave(CONTENT + b"more")
    case.run()
    assert case.ranges() == [""]
    assert case.blob.read_bytes() == CONTENT


def test_status_that_may_pass_is_tried_again(case: Case) -> None:
    case.hub.statuses[WEIGHTS] = [503, 429, 500]
    case.run()
    assert case.blob.read_bytes() == CONTENT


def test_hub_that_stays_away_keeps_what_has_arrived(case: Case) -> None:
    case.hub.cuts[WEIGHTS] = [1000, *[0] * 20]
    with pytest.raises(HubError, match=re.escape(case.hub.url)):
        case.run()
    assert case.partial.read_bytes() == CONTENT[:1000]
    assert len(case.ranges()) == 1 + transfer.MAX_FRUITLESS
    case.hub.cuts.clear()
    case.run()
    assert case.blob.read_bytes() == CONTENT


@pytest.mark.parametrize("kept", [0, HALF])
def test_wrong_checksum_names_the_file_and_throws_it_away(case: Case, kept: int) -> None:
    case.leave(b"?" * kept)
    case.hub.spoiled.add(WEIGHTS)
    with pytest.raises(HubError, match=r"model\.safetensors .*org/tiny .*[0-9a-f]{12}.*[0-9a-f]{12}"):
        case.run()
    assert not case.partial.exists()
    assert not case.blob.exists()
    case.hub.spoiled.clear()
    case.run()
    assert case.blob.read_bytes() == CONTENT


def test_file_that_is_longer_than_listed_is_refused(case: Case) -> None:
    case.file = RemoteFile(WEIGHTS, 2000, case.file.digest)
    with pytest.raises(HubError, match=r"\b2000\b"):
        case.run()


def test_full_disk_is_an_error_and_keeps_what_has_arrived(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(_out: int, _content: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match=str(errno.ENOSPC)):
        case.run()
    monkeypatch.undo()
    assert case.partial.exists()


def test_stop_ends_a_transfer_and_keeps_what_has_arrived(case: Case) -> None:
    case.stop.set()
    with pytest.raises(StoppedError):
        case.run()
    assert 0 < case.partial.stat().st_size <= len(CONTENT)
    case.stop.clear()
    case.run()
    assert case.blob.read_bytes() == CONTENT


def test_blob_that_another_transfer_makes_is_waited_for(case: Case) -> None:
    case.hub.hold.clear()
    first = Case(case.hub, case.model.cache.root)
    running = threading.Thread(target=first.run)
    running.start()
    second = threading.Thread(target=case.run)
    while not case.hub.bodies(WEIGHTS):
        running.join(0.01)
    second.start()
    while not case.waits:
        second.join(0.01)
    case.hub.hold.set()
    running.join()
    second.join()
    assert case.waits == [WEIGHTS]
    assert case.blob.read_bytes() == CONTENT
    assert len(case.ranges()) == 1
