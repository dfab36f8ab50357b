"""The transfer of tensors from files into parameters by several threads."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock, Thread

import torch

from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.copiers import Copier, HostCopier, HostToDeviceCopier
from tandem.engine_core.loader.filling import Filling, Job, Span, bytes_of, spans
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.loader.source_file import SourceFile

PIECE_BYTES = 2**24
"""Largest piece, and largest span of small tensors. For a GPU, each thread holds two in pinned memory; for a CPU one,
unless it can read directly into the parameter."""
MAX_THREADS = 16
"""Maximum number of reading threads: the copies to an H200 keep up with 16 of them, and pinned memory stays at 512
MiB."""

Progress = Callable[[int, int], None]
"""Called with the bytes that are done, and with all."""


def transfer(
    slots: list[WeightSlot], checkpoint: Checkpoint, progress: Progress | None = None, threads: int | None = None
) -> None:
    """Fill slots from the tensors of a checkpoint that has all of them.

    Besides the parameters, host memory holds at most two pieces of PIECE_BYTES for each thread.

    progress: never called by two threads at once; threads: None for the number of cores, up to MAX_THREADS.

    Raises ConfigError if a file cannot be read or a slot's part does not fit its region; then some slots are filled.
    """
    devices = {slot.parameter.device for slot in slots}
    assert len(devices) <= 1, f"the parameters of a model are on one device, not {devices}"
    for device in devices:
        with ExitStack() as stack:
            files = {path: stack.enter_context(SourceFile(path)) for path in _paths(slots, checkpoint)}
            memory = {id(slot.parameter): slot.parameter for slot in slots}
            memory = {key: bytes_of(parameter) for key, parameter in memory.items()}
            jobs: list[Job] = []
            for slot in slots:
                stored = checkpoint.tensors[slot.name]
                jobs += Filling(slot, stored, files[stored.path], memory[id(slot.parameter)]).jobs(PIECE_BYTES)
            found = list(spans(jobs, PIECE_BYTES))
            count = min(threads or _thread_count(), len(found))
            largest = max((span.nbytes for span in found), default=0)
            with single_threaded_torch():
                _Transfer(found, progress).run([_copier(device, largest) for _ in range(count)])
        if device.type == "cuda":
            _release_pinned()


class _Transfer:
    """Spans that threads take in the order of the files."""

    def __init__(self, spans: list[Span], progress: Progress | None) -> None:
        self._spans = deque(spans)
        self._progress = progress
        self._lock = Lock()
        self._done, self._total = 0, sum(span.nbytes for span in spans)
        self._error: BaseException | None = None

    def run(self, copiers: list[Copier]) -> None:
        """Do all spans, with a thread for each copier.

        Raises the first error of any of them.
        """
        threads = [Thread(target=self._work, args=(copier,), name="loader") for copier in copiers[1:]]
        try:
            for thread in threads:
                thread.start()
            for copier in copiers[:1]:
                self._work(copier)
        finally:
            self._spans.clear()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if self._error is not None:
            raise self._error

    def _work(self, copier: Copier) -> None:
        try:
            with torch.inference_mode(), copier:
                while span := self._take():
                    for copied in copier.copy(span):
                        self._end(copied)
                for copied in copier.finish():
                    self._end(copied)
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
            self._spans.clear()

    def _take(self) -> Span | None:
        try:
            return self._spans.popleft()
        except IndexError:
            return None

    def _end(self, span: Span) -> None:
        for job in span.jobs:
            job.filling.end_piece()
        with self._lock:
            self._done += span.nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)


def _paths(slots: list[WeightSlot], checkpoint: Checkpoint) -> list[Path]:
    return sorted({checkpoint.tensors[slot.name].path for slot in slots})


def _thread_count() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


@contextmanager
def single_threaded_torch() -> Iterator[None]:
    """Let each thread that starts in this context do its own arithmetic.

    By default torch would start a pool of threads for each of them.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def _copier(device: torch.device, nbytes: int) -> Copier:
    return HostToDeviceCopier(nbytes, device) if device.type == "cuda" else HostCopier(nbytes)


def _release_pinned() -> None:
    """Give pinned memory that is not in use back to the system, where torch can."""
    if (release := getattr(torch.accelerator, "empty_host_cache", None)) is not None:
        release()
