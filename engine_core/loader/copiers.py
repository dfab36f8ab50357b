"""Copiers from files to parameters, one class per kind of device.

A copier is a context manager that one thread enters and uses.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from tandem.engine_core.loader.filling import Job, Span
from tandem.engine_core.loader.source_file import BufferAddressError, memory_of

BLOCK_ROWS = 64
"""Rows that are transposed at once on the host: their cache lines are written whole, 3 to 5 times as fast."""
STAGING_BUFFERS = 2
"""Buffers of a copier to a GPU: one is filled while the other is copied."""


class Copier(Protocol):
    """Copies spans of files to one device."""

    def __enter__(self) -> Self:
        """Allocate buffers and streams."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def copy(self, span: Span) -> Iterator[Span]:
        """Read a span and start to copy it.

        Yield the spans, of this call or earlier ones, that have been copied.
        """

    def finish(self) -> Iterator[Span]:
        """Wait for all copies, and yield the spans that `copy` has not."""


class HostCopier:
    """Implement `Copier` for parameters in host memory.

    A piece with the parameter's dtype and layout is read directly into it, any other via a buffer.
    """

    def __init__(self, nbytes: int) -> None:
        """Set up a copier.

        nbytes: size of the largest span.
        """
        self._nbytes = nbytes
        self._buffer: Tensor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._buffer = None

    def copy(self, span: Span) -> Iterator[Span]:
        """Implement `Copier.copy`."""
        for job in span.jobs:
            if job.plain is not None and job.plain.device.type == "cpu":
                job.read(memory_of(job.plain))
            else:
                if self._buffer is None:
                    self._buffer = torch.empty(self._nbytes, dtype=torch.uint8)
                buffer = self._buffer[: job.nbytes]
                job.read(memory_of(buffer))
                _copy(job.view(buffer), job.target())
        yield span

    def finish(self) -> Iterator[Span]:
        """Implement `Copier.finish`."""
        yield from ()


class HostToDeviceCopier:
    """Implement `Copier` for parameters on a GPU.

    Spans are read into pinned buffers, copied on the copier's own stream, and cast there if needed.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Set up a copier.

        nbytes: size of the largest span.
        """
        self._nbytes = nbytes
        self._device = device
        self._stack = ExitStack()
        self._buffers: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []
        self._moving: list[Span | None] = [None] * STAGING_BUFFERS
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

    def copy(self, span: Span) -> Iterator[Span]:
        """Implement `Copier.copy`."""
        turn = self._turn
        self._turn = (turn + 1) % STAGING_BUFFERS
        yield from self._await(turn)
        buffer = self._buffers[turn]
        self._read(span, buffer)
        parts = buffer[: span.nbytes].split_with_sizes([job.nbytes for job in span.jobs])
        for job, read in zip(span.jobs, parts, strict=True):
            if job.plain is not None:
                job.plain.copy_(read, non_blocking=True)
            else:
                self._copy_cast(job, read)
        self._events[turn].record()
        self._moving[turn] = span

    def finish(self) -> Iterator[Span]:
        """Implement `Copier.finish`."""
        for turn in range(STAGING_BUFFERS):
            yield from self._await(turn)

    def _copy_cast(self, job: Job, read: Tensor) -> None:
        """Copy bytes as they are, then cast and rearrange them: the host would cast into unpinned memory."""
        if self._cast is None:
            self._cast = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        cast = self._cast[: job.nbytes]
        cast.copy_(read, non_blocking=True)
        job.target().copy_(job.view(cast))

    def _read(self, span: Span, buffer: Tensor) -> None:
        if self._unpinned is None:
            try:
                span.read(memory_of(buffer)[: span.nbytes])
                return
            except BufferAddressError:
                self._unpinned = torch.empty(self._nbytes, dtype=torch.uint8)
        span.read(memory_of(self._unpinned)[: span.nbytes])
        buffer[: span.nbytes].copy_(self._unpinned[: span.nbytes])

    def _await(self, turn: int) -> Iterator[Span]:
        span = self._moving[turn]
        if span is not None:
            self._events[turn].synchronize()
            self._moving[turn] = None
            yield span


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy on the host, in blocks if the target has another order in memory."""
    if target.is_contiguous():
        target.copy_(source)
    else:
        for start in range(0, len(target), BLOCK_ROWS):
            target[start : start + BLOCK_ROWS].copy_(source[start : start + BLOCK_ROWS])
