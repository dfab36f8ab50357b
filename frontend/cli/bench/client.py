"""Client process with a share of the streams or arrivals of a load.

A chunk costs a client about 50 us on a slow core, so one process handles at most twenty thousand per second. A
benchmark therefore uses several processes and reports the CPU time of each: near 100 % of a core, the client limits the
results.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec

from tandem.frontend.cli.bench.completion import Dialect, RequestFailedError, complete
from tandem.frontend.cli.bench.connection import ConnectionPool, Endpoint
from tandem.frontend.cli.bench.record import Record, Share
from tandem.frontend.cli.bench.workloads import Load, Workload

ERROR_PAUSE = 0.1
"""Seconds that a stream waits after a failure, to avoid thousands of requests per second to a failing server."""


@dataclass(frozen=True)
class Job:
    """Load and everything needed to send it."""

    endpoints: list[Endpoint]
    dialect: Dialect
    workload: Workload
    load: Load
    timeout: float


class Client:
    """Runs its share of a job on the running event loop."""

    def __init__(self, job: Job, process: int, processes: int, finished: Callable[[], None]) -> None:
        self._job = job
        self._streams = job.load.streams_of(process, processes)
        self._arrivals: list[tuple[int, float]] = []
        if job.load.rate is not None:
            self._arrivals = job.load.arrivals_of(process, processes, job.workload.seed)
        self._in_flight = job.load.in_flight_of(process, processes)
        self._finished = finished
        self._pool = ConnectionPool(job.endpoints)
        self._prepared: dict[int, tuple[Record, bytes]] = {}
        self._records: list[Record] = []
        self._deadline = float("inf")

    async def prepare(self) -> None:
        """Open connections and build bodies in advance.

        An initial burst then does not wait for them.
        """
        firsts = [*self._streams, *(index for index, _ in self._arrivals)]
        for index in firsts:
            self._prepared[index] = self._build(index)
        # Connection errors are counted with the requests.
        await asyncio.gather(
            *(self._pool.connect(self._pool.endpoint_of(i)) for i in self._streams), return_exceptions=True
        )

    async def run(self, start: float) -> list[Record]:
        """Run from the start time, on the monotonic clock, to the last response."""
        load = self._job.load
        if load.duration is not None:
            self._deadline = start + load.duration
        await asyncio.sleep(start - time.monotonic())
        if load.rate is None:
            await asyncio.gather(*(self._stream(stream) for stream in self._streams))
        else:
            await self._open_loop(start)
        return self._records

    async def close(self) -> None:
        await self._pool.close()

    async def _stream(self, stream: int) -> None:
        for index in self._job.load.indices_of(stream):
            if time.monotonic() >= self._deadline:
                return
            if not await self._request(index):
                await asyncio.sleep(ERROR_PAUSE)

    async def _open_loop(self, start: float) -> None:
        slots = None if self._in_flight is None else asyncio.Semaphore(self._in_flight)
        async with asyncio.TaskGroup() as tasks:
            for index, due in self._arrivals:
                if (wait := start + due - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                tasks.create_task(self._arrive(index, start + due, slots))

    async def _arrive(self, index: int, due: float, slots: asyncio.Semaphore | None) -> None:
        """Send a request that is due, once a slot is free."""
        async with slots or nullcontext():
            await self._request(index, due)

    def _build(self, index: int) -> tuple[Record, bytes]:
        request = self._job.workload.request(self._job.load.label, index)
        record = Record(index, request.max_tokens, prompt_tokens=len(request.prompt), priority=request.priority)
        return record, self._job.dialect.body(request)

    async def _request(self, index: int, due: float | None = None) -> bool:
        """Send one request; return True if the response was complete.

        It is recorded in any case.
        """
        record, body = self._prepared.pop(index) if index in self._prepared else self._build(index)
        record.start = time.monotonic()
        record.lag = 0.0 if due is None else record.start - due
        try:
            async with asyncio.timeout(self._job.timeout):
                await complete(self._pool, body, record)
        except TimeoutError:
            record.error, record.detail = "timed out", f"after {self._job.timeout:g} s"
        except RequestFailedError as failure:
            record.error, record.detail = failure.kind, failure.detail
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            record.error, record.detail = type(error).__name__, str(error)[:300]
        record.end = time.monotonic()
        self._records.append(record)
        self._finished()
        return record.error is None


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop if installed: it halves the client's cost per token."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def take_part(
    job: Job, process: int, processes: int, finished: Callable[[], None], go: Callable[[], float]
) -> Share:
    """Prepare, wait until `go` returns the common start time, and run."""
    client = Client(job, process, processes, finished)
    try:
        await client.prepare()
        start, cpu = go(), time.process_time()
        records = await client.run(start)
        return Share(records, time.process_time() - cpu)
    finally:
        await client.close()


def _end_with_parent() -> None:
    """Exit this process when its parent exits.

    Otherwise clients of a killed parent would keep loading the server.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def serve_jobs(pipe: Any, process: int, processes: int, counts: Any) -> None:
    """Run jobs from a pipe in a client process until None arrives.

    It sends a message when ready, receives the start time, and sends its share as msgpack. counts: shared memory with
    one number per process, for the progress bar.
    """
    # Ctrl-C reaches the whole process group; the parent stops its clients itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def finished() -> None:
        counts[process] += 1

    def go() -> float:
        pipe.send(None)
        start: float = pipe.recv()
        return start

    while (job := pipe.recv()) is not None:
        counts[process] = 0
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            share = runner.run(take_part(job, process, processes, finished, go))
        pipe.send_bytes(msgspec.msgpack.encode(share))
