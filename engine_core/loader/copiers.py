"""Copiers from files to parameters, one class per kind of device.

A copier is a context manager that one thread enters and uses.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from tandem.engine_core.loader.filling import Job
from tandem.engine_core.loader.source_file import BufferAddressError, memory_of

BLOCK_ROWS = 64
"""Rows that are transposed at once on the host: their cache lines are written whole, 3 to 5 times as fast."""
STAGING_BUFFERS = 2
"""Buffers of a copier to a GPU: one is filled while the other is copied."""


class Copier(Protocol):
    """Copies pieces of files to one device."""

    def __enter__(self) -> Self:
        """Allocate buffers and streams."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def copy(self, job: Job) -> Iterator[Job]:
        """Read a piece and start to copy it.

        Yield the pieces, of this call or earlier ones, that have been copied.
        """

    def finish(self) -> Iterator[Job]:
        """Wait for all copies, and yield the pieces that `move` has not."""


class HostCopier:
    """Implement `Copier` for parameters in host memory.

    A piece with the parameter's dtype and layout is read directly into it, any other via a buffer.
    """

    def __init__(self, nbytes: int) -> None:
        """Set up a copier.

        nbytes: size of the largest piece.
        """
        self._nbytes = nbytes
        self._buffer: Tensor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._buffer = None

    def copy(self, job: Job) -> Iterator[Job]:
        """Implement `Copier.copy`."""
        target = job.target()
        if target.device.type == "cpu" and job.is_plain(target):
            job.read(memory_of(target))
        else:
            if self._buffer is None:
                self._buffer = torch.empty(self._nbytes, dtype=torch.uint8)
            job.read(memory_of(self._buffer)[: job.nbytes])
            _copy(job.view(self._buffer), target)
        yield job

    def finish(self) -> Iterator[Job]:
        """Implement `Copier.finish`."""
        yield from ()


class HostToDeviceCopier:
    """Implement `Copier` for parameters on a GPU.

    Pieces are read into pinned buffers, copied on the copier's own stream, and cast there if needed.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Set up a copier.

        nbytes: size of the largest piece.
        """
        self._nbytes = nbytes
        self._device = device
        self._stack = ExitStack()
        self._buffers: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []
        self._moving: list[Job | None] = [None] * STAGING_BUFFERS
        self._turn = 0
        self._cast: Tensor | None = None
        """Buffer on the GPU for pieces that are cast or rearranged there."""
        self._unpinned: Tensor | None = None
        """Buffer that files are read into where the kernel does not read into pinned memory."""

    def __enter__(self) -> Self:
        # Another stream may still use the memory of parameters for a freed tensor.
        torch.cuda.synchronize(self._device)
        self._stack.enter_context(torch.cuda.device(self._device))
        self._stack.enter_context(torch.cuda.stream(torch.cuda.Stream(self._device)))  # type: ignore[no-untyped-call]
        for _ in range(STAGING_BUFFERS):
            self._buffers.append(torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=True))
            self._events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            torch.cuda.current_stream().synchronize()
        self._buffers.clear()
        self._cast = self._unpinned = None
        self._stack.close()

    def copy(self, job: Job) -> Iterator[Job]:
        """Implement `Copier.copy`."""
        turn = self._turn
        self._turn = (turn + 1) % STAGING_BUFFERS
        yield from self._await(turn)
        buffer, target = self._buffers[turn], job.target()
        self._read(job, buffer)
        if job.is_plain(target):
            target.copy_(job.view(buffer), non_blocking=True)
        else:
            # A host-to-device copy that casts would cast on the host, into unpinned memory.
            if self._cast is None:
                self._cast = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
            self._cast[: job.nbytes].copy_(buffer[: job.nbytes], non_blocking=True)
            target.copy_(job.view(self._cast))
        self._events[turn].record()
        self._moving[turn] = job

    def finish(self) -> Iterator[Job]:
        """Implement `Copier.finish`."""
        for turn in range(STAGING_BUFFERS):
            yield from self._await(turn)

    def _read(self, job: Job, buffer: Tensor) -> None:
        if self._unpinned is None:
            try:
                job.read(memory_of(buffer)[: job.nbytes])
                return
            except BufferAddressError:
                self._unpinned = torch.empty(self._nbytes, dtype=torch.uint8)
        job.read(memory_of(self._unpinned)[: job.nbytes])
        buffer[: job.nbytes].copy_(self._unpinned[: job.nbytes])

    def _await(self, turn: int) -> Iterator[Job]:
        job = self._moving[turn]
        if job is not None:
            self._events[turn].synchronize()
            self._moving[turn] = None
            yield job


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy on the host, in blocks if the target has another order in memory."""
    if target.is_contiguous():
        target.copy_(source)
    else:
        for start in range(0, len(target), BLOCK_ROWS):
            target[start : start + BLOCK_ROWS].copy_(source[start : start + BLOCK_ROWS])
