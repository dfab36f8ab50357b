"""Transfer of a file from the hub to a blob of the cache.

It resumes partial downloads, and verifies the hash before the blob gets its name. huggingface_hub keeps no partial
files, which for weights are many gigabytes.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
from filelock import FileLock, Timeout
from msgspec import Struct

from tandem.frontend.hub.cache import ModelCache
from tandem.frontend.hub.client import RemoteFile
from tandem.frontend.hub.connections import Connections
from tandem.frontend.hub.errors import HubError, RequestedModel, UnreachableError
from tandem.frontend.hub.progress import DownloadProgress

MAX_FRUITLESS = 5
"""Consecutive attempts without any data after which a transfer fails."""
CHUNK_BYTES = 2**20
_FIRST_PAUSE, _LAST_PAUSE = 0.5, 8.0
_LOCK_POLL_SECONDS = 0.2
_BUSY = (429, 500, 502, 503, 504)
_PARTIAL, _BEYOND = 206, 416


class StoppedError(Exception):
    """The transfer was aborted; its partial file is kept."""


class Source(Struct, frozen=True):
    """URL that a file is downloaded from."""

    url: str
    headers: Mapping[str, str]
    """Request headers; the client drops the token if a redirect leaves the hub."""
    requested: RequestedModel


class Transfer:
    """Transfer of one file, in a thread."""

    def __init__(
        self,
        cache: ModelCache,
        file: RemoteFile,
        source: Source,
        connections: Connections,
        stop: threading.Event,
        progress: DownloadProgress,
        on_wait: Callable[[str], None],
    ) -> None:
        """Initialize the transfer.

        stop: aborts it. on_wait: called with the file name if another process downloads it.
        """
        self._cache = cache
        self._file = file
        self._source = source
        self._connections = connections
        self._stop = stop
        self._progress = progress
        self._on_wait = on_wait

    def run(self) -> None:
        """Create the blob, unless it exists.

        Raises HubError on failure, StoppedError if `stop` was set.
        """
        blob, partial = self._cache.blob(self._file.digest), self._cache.partial(self._file.digest)
        blob.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if blob.exists():
                self._progress.keep_bytes(self._file.size)
                return
            with partial.open("ab", buffering=0) as out:
                if out.tell() > self._file.size:
                    out.truncate(0)
                self._progress.keep_bytes(out.tell())
                self._fill(out.fileno())
            self._check(partial)
            os.replace(partial, blob)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the blob, as programs that use huggingface_hub do."""
        self._cache.locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._cache.locks / f"{self._file.digest}.lock", mode=0o664)
        waited = False
        while True:
            try:
                lock.acquire(timeout=_LOCK_POLL_SECONDS if waited else 0)
                break
            except Timeout:
                if not waited:
                    self._on_wait(self._file.name)
                waited = True
                if self._stop.is_set():
                    raise StoppedError from None
            except (
                NotImplementedError
            ):  # the file system has no locks; the hash check detects corruption by two writers
                yield
                return
        try:
            yield
        finally:
            lock.release()

    def _fill(self, out: int) -> None:
        """Append to the partial file until it is complete."""
        fruitless, pause = 0, _FIRST_PAUSE
        while (have := os.fstat(out).st_size) < self._file.size:
            try:
                self._append(out, have)
                problem: HubError = UnreachableError(f"the connection to {self._source.requested.endpoint} was cut")
            except httpx.TransportError as error:
                problem = self._source.requested.explain(error)
            except _BusyError as error:
                problem = self._source.requested.explain_status(error.status)
            if self._stop.is_set():
                raise StoppedError
            if os.fstat(out).st_size > have:
                fruitless, pause = 0, _FIRST_PAUSE
                continue
            fruitless += 1
            if fruitless == MAX_FRUITLESS:
                raise HubError(f"{problem}; what has arrived is kept, start again to continue")
            self._stop.wait(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    def _append(self, out: int, have: int) -> None:
        """Request the missing bytes and append the response."""
        headers = {**self._source.headers, "accept-encoding": "identity"}
        if have:
            headers["range"] = f"bytes={have}-"
        with self._connections.get(self._source.url, headers) as answer:
            if answer.status_code in _BUSY:
                raise _BusyError(answer.status_code)
            if answer.status_code == _BEYOND or (have and answer.status_code == 200):
                os.ftruncate(out, 0)  # the server does not support ranges, or the file has changed
                self._progress.add_bytes(-have)
                have = 0
            if answer.status_code == _BEYOND:
                return
            if answer.status_code not in (200, _PARTIAL):
                raise self._source.requested.explain_status(answer.status_code)
            for chunk in answer.iter_raw(CHUNK_BYTES if self._file.size > CHUNK_BYTES else None):
                have += len(chunk)
                if have > self._file.size:
                    raise self._spoiled(f"more than the {self._file.size} bytes that the hub lists")
                _write(out, chunk)
                self._progress.add_bytes(len(chunk))
                if self._stop.is_set():
                    raise StoppedError

    def _check(self, partial: Path) -> None:
        """Verify the content against the hash listed by the hub.

        Raises HubError and removes the file if they differ.
        """
        with partial.open("rb") as content:
            if len(self._file.digest) == 64:
                found = hashlib.file_digest(content, "sha256").hexdigest()
            else:  # a git object id is the SHA-1 of a header and the content
                blob = hashlib.sha1(f"blob {self._file.size}\0".encode(), usedforsecurity=False)
                found = hashlib.file_digest(content, lambda: blob).hexdigest()
        if found != self._file.digest:
            partial.unlink()
            raise self._spoiled(f"the checksum {found[:12]}, the hub lists {self._file.digest[:12]}")

    def _spoiled(self, problem: str) -> HubError:
        return HubError(
            f"{self._file.name} of {self._source.requested.name} arrived with {problem} and was deleted; start again, "
            "and if it happens again, look for a proxy in between"
        )


class _BusyError(Exception):
    """The hub responded with a transient error status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def _write(out: int, chunk: bytes) -> None:
    """Write a whole chunk: a nearly full disk accepts part of it before it fails."""
    view = memoryview(chunk)
    while view:
        view = view[os.write(out, view) :]
