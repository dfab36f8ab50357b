"""Manage client processes."""

import multiprocessing
import signal
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.resource_tracker import ensure_running
from types import TracebackType

import msgspec

from tandem.frontend.cli.bench.client import Job, serve_jobs
from tandem.frontend.cli.bench.record import Share
from tandem.frontend.progress import Progress

HEAD_START = 0.05
"""Seconds between the last process being ready and the first request, so that all processes learn the start time
beforehand."""


class ClientDiedError(Exception):
    """A client process exited without sending its records."""


def _start(process: SpawnProcess) -> None:
    """Start a process with interrupts blocked until `serve_jobs` ignores them.

    Ctrl-C reaches it too, and would abort its imports with a traceback. A new process inherits the signal mask.
    """
    ensure_running()  # the first process start would start it too, and it unblocks interrupts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Clients:
    """Client processes, started on entry of the context and stopped on exit.

    They are spawned, since forked ones would inherit the parent's threads and sockets.
    """

    def __init__(self, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._counts = context.Array("Q", processes, lock=False)
        ends = [context.Pipe() for _ in range(processes)]
        self._pipes = [ours for ours, _ in ends]
        self._far_ends = [theirs for _, theirs in ends]
        self._processes = [
            context.Process(target=serve_jobs, args=(far_end, rank, processes, self._counts), daemon=True)
            for rank, far_end in enumerate(self._far_ends)
        ]

    def __enter__(self) -> "Clients":
        for process, far_end in zip(self._processes, self._far_ends, strict=True):
            _start(process)
            # Close our copy of its end, so that the pipe signals the death of the process.
            far_end.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            if kind is None:
                pipe.send(None)
            else:
                process.terminate()
            process.join()
            pipe.close()

    def run(self, job: Job, progress: Progress) -> list[Share]:
        """Run a job on all processes, one share each."""
        for pipe in self._pipes:
            pipe.send(job)
        for pipe in self._pipes:
            self._receive(pipe)
        start = time.monotonic() + HEAD_START
        for pipe in self._pipes:
            pipe.send(start)
        shares: dict[int, Share] = {}
        while len(shares) < len(self._pipes):
            pending = [pipe for rank, pipe in enumerate(self._pipes) if rank not in shares]
            ready = wait(pending, timeout=progress.interval)
            for pipe in (pipe for pipe in pending if pipe in ready):
                shares[self._pipes.index(pipe)] = msgspec.msgpack.decode(self._receive(pipe), type=Share)
            progress.draw(sum(self._counts), time.monotonic() - start)
        return [shares[rank] for rank in range(len(self._pipes))]

    def _receive(self, pipe: Connection) -> bytes:
        try:
            return pipe.recv_bytes()
        except EOFError:
            rank = self._pipes.index(pipe)
            self._processes[rank].join()
            raise ClientDiedError(f"client process {rank} exited with {self._processes[rank].exitcode}") from None
