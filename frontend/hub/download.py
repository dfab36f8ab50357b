"""Download the files of a model, several at a time."""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import cached_property

from tandem.frontend.hub.client import MAX_HTTP_BYTES, HubModel, Listing, RemoteFile
from tandem.frontend.hub.connections import Connections, open_connections
from tandem.frontend.hub.errors import HubError, explain_file_error
from tandem.frontend.hub.options import BeforeWeights
from tandem.frontend.hub.progress import DownloadProgress, size_text
from tandem.frontend.hub.selection import (
    CONFIG,
    INDEX,
    SINGLE,
    SelectionError,
    missing,
    shards,
    small_files,
    weight_index,
)
from tandem.frontend.hub.transfer import Source, StoppedError, Transfer

logger = logging.getLogger(__name__)

THREADS = 8
"""Maximum number of concurrent downloads."""
_SHOW_SECONDS = 0.2
_END_SECONDS = 2.0
"""Seconds to wait for threads to finish; one that is still connecting or hashing a file then reads from no
connection."""


class Download:
    """Download of one commit into the cache.

    stop: aborts it from another thread.
    """

    def __init__(self, model: HubModel, listing: Listing, with_weights: bool, stop: threading.Event) -> None:
        """Initialize; leaving the context closes the connections.

        with_weights: False for a frontend, which needs the tokenizer and templates only.
        """
        self._model = model
        self._listing = listing
        self._with_weights = with_weights
        self._stop = stop
        self._snapshot = model.cache.snapshot(listing.commit)
        self._resources = ExitStack()

    def __enter__(self) -> "Download":
        return self

    def __exit__(self, *_exit: object) -> None:
        self._resources.close()

    def run(self, before_weights: BeforeWeights | None = None) -> None:
        """Download the files missing from the snapshot.

        Raises HubError on failure, and what `before_weights` raises; partial files are kept, which is logged on a
        KeyboardInterrupt.
        """
        try:
            wanted = self.wanted()
            if absent := [file for file in wanted if not (self._snapshot / file.name).exists()]:
                if before_weights is not None:
                    # An unsupported model is refused for that reason, even if the disk is too small for its weights.
                    self._download([file for file in absent if not _is_weights(file)])
                    absent = [file for file in absent if _is_weights(file)]
                    if absent:
                        before_weights(self._snapshot, weight_bytes(wanted))
                self._download(absent)
        except OSError as error:
            raise HubError(explain_file_error(error, self._model.cache.root)) from None
        if self._with_weights or not self._serves_earlier():
            self._model.cache.record(self._model.revision, self._listing.commit)

    def _serves_earlier(self) -> bool:
        """Return whether an earlier download of the revision has weights.

        It is the fallback while the hub is unreachable.
        """
        commit = self._model.cache.commit_of(self._model.revision)
        return commit is not None and not missing(self._model.cache.snapshot(commit), with_weights=True)

    def wanted(self) -> list[RemoteFile]:
        """Return the required files, weights last.

        This downloads the index of shards. Raises HubError for a repository without the files of a model.
        """
        files = self._listing.files
        chosen = small_files(files)
        if CONFIG not in chosen:
            raise self._refuse(f"has no {CONFIG}, which every model in Hugging Face's format has")
        if not self._with_weights:
            return [files[name] for name in chosen]
        try:
            if weight_index(files) is None:
                return [files[name] for name in (*chosen, SINGLE)]
            self.check_space([files[INDEX]])
            self._fetch([files[INDEX]], _new_progress([files[INDEX]]))
            named = shards((self._snapshot / INDEX).read_bytes(), files)
        except SelectionError as error:
            raise self._refuse(str(error)) from None
        return [files[name] for name in (*chosen, INDEX, *named)]

    def _refuse(self, reason: str) -> HubError:
        return HubError(f"the model {self._model.name} (commit {self._listing.commit[:12]}) {reason}")

    def check_space(self, files: Sequence[RemoteFile]) -> None:
        """Raise HubError if the disk is too small for the missing files."""
        needed = sum(file.size - self._held(file) for file in files)
        free = self._model.cache.free_bytes()
        if needed > free:
            raise HubError(
                f"{self._model.name} needs {size_text(needed)} ({needed} bytes) more in {self._model.cache.root}, and "
                f"{size_text(free)} ({free} bytes) are free: free some space, or give a folder on another disk with "
                "--download-dir"
            )

    def _held(self, file: RemoteFile) -> int:
        """Return the number of bytes of a file that are on disk."""
        for path in (self._model.cache.blob(file.digest), self._model.cache.partial(file.digest)):
            if path.is_file():
                return min(path.stat().st_size, file.size)
        return 0

    def _download(self, files: Sequence[RemoteFile]) -> None:
        """Download files with progress, after a check of the disk space.

        Small files come first, so that a snapshot never has weights without them.
        """
        if not files:
            return
        self.check_space(files)
        total = sum(file.size for file in files)
        logger.info(
            "downloading %s, commit %s: %s, %s, to %s",
            self._model.name,
            self._listing.commit,
            "1 file" if len(files) == 1 else f"{len(files)} files",
            size_text(total),
            self._snapshot,
        )
        progress = _new_progress(files)
        weights = [file for file in files if _is_weights(file)]
        config = [file for file in files if file.name == CONFIG]
        small = [file for file in files if file not in weights and file not in config]
        try:
            for stage in (small, config, weights):
                self._fetch(stage, progress)
        except (KeyboardInterrupt, StoppedError):
            progress.clear()
            logger.warning(
                "interrupted: %s of %s are kept in %s, and the same command continues there",
                size_text(progress.bytes_done),
                size_text(total),
                self._model.cache.folder,
            )
            raise
        finally:
            progress.clear()
        logger.info("downloaded %s", progress.text())

    def _fetch(self, files: Sequence[RemoteFile], progress: DownloadProgress) -> None:
        """Download files in threads and wait for them.

        They are daemon threads, which do not keep the process alive.
        """
        waiting: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
        for file in files:
            waiting.put(file)
        finished: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def work() -> None:
            while True:
                try:
                    file = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    self._fetch_one(file, connections, progress)
                    finished.put(None)
                except Exception as error:
                    finished.put(error)
                    return

        connections = self._connections
        threads = [threading.Thread(target=work, name="download", daemon=True) for _ in range(min(THREADS, len(files)))]
        for thread in threads:
            thread.start()
        try:
            self._wait(len(files), finished, progress)
        except BaseException:
            self._stop.set()
            connections.cut()
            deadline = time.monotonic() + _END_SECONDS
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            raise

    def _wait(self, files: int, finished: "queue.SimpleQueue[Exception | None]", progress: DownloadProgress) -> None:
        """Show the progress until all files are complete.

        Raises the first exception of a thread, or StoppedError if `stop` was set.
        """
        while files:
            try:
                error = finished.get(timeout=_SHOW_SECONDS)
            except queue.Empty:
                if self._stop.is_set():
                    raise StoppedError from None
            else:
                files -= 1
                if error is not None:
                    raise error if isinstance(error, OSError | StoppedError) else self._model.requested.explain(error)
            progress.show()

    @cached_property
    def _connections(self) -> Connections:
        """Connections, created on first use: a cached model needs none."""
        return self._resources.enter_context(closing(open_connections(THREADS)))

    def _fetch_one(self, file: RemoteFile, connections: Connections, progress: DownloadProgress) -> None:
        if self._stop.is_set():
            raise StoppedError
        if (self._snapshot / file.name).exists():
            return
        commit = self._listing.commit
        if file.size > MAX_HTTP_BYTES:
            self._model.download_large(file, commit)
        else:
            source = Source(self._model.url(file, commit), self._model.headers(), self._model.requested)
            Transfer(self._model.cache, file, source, connections, self._stop, progress, _log_wait).run()
            # Not via the library, which would send another request and could use a response that was not checked.
            self._model.cache.link(file.name, file.digest, commit)
        progress.add_file()


def weight_bytes(files: Sequence[RemoteFile]) -> int:
    """Return the total bytes of the weights among some files."""
    return sum(file.size for file in files if _is_weights(file))


def _is_weights(file: RemoteFile) -> bool:
    return file.name.endswith(".safetensors")


def _new_progress(files: Sequence[RemoteFile]) -> DownloadProgress:
    return DownloadProgress(len(files), sum(file.size for file in files), time.monotonic)


def _log_wait(name: str) -> None:
    logger.info("another process is downloading %s; waiting for it", name)
