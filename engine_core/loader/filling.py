"""Filling slots with pieces that several threads read."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from threading import Lock

import torch
from torch import Tensor

from tandem.engine_core.loader.header import TORCH_DTYPES, StoredTensor
from tandem.engine_core.loader.pieces import Piece, cut
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.loader.source_file import SourceFile


def bytes_of(parameter: Tensor) -> Tensor:
    """Return the bytes of a parameter in one dimension; an empty tensor if they are not contiguous."""
    if not parameter.is_contiguous():
        return torch.empty(0, dtype=torch.uint8)
    return parameter.view(-1).view(torch.uint8)


class Filling:
    """A slot and the number of pieces that it still lacks.

    Without a transform, pieces are written to the slot's region. With a transform, they are written to a temporary
    tensor on the same device, which is transformed after the last piece.
    """

    def __init__(self, slot: WeightSlot, stored: StoredTensor, file: SourceFile, memory: Tensor) -> None:
        """Set up a filling from a tensor in a file. memory: bytes of the parameter (`bytes_of`)."""
        self.slot = slot
        self.stored = stored
        self.file = file
        self._memory = memory
        self.dtype = TORCH_DTYPES[stored.dtype]
        self._lock = Lock()
        self._left = 0
        self._part: Tensor | None = None

    def jobs(self, nbytes: int) -> "list[Job]":
        """Cut the filling into pieces of at most `nbytes` bytes.

        Raises ConfigError if the slot's part of the tensor does not have the shape of its region.
        """
        slot = self.slot
        if slot.transform is None:
            slot.check(self._part_shape())
        size, start, plain = self.dtype.itemsize, self.stored.start, self._plain_start()
        jobs = []
        for piece in cut(self.stored.shape, slot.source, nbytes // size):
            offset, length = piece.start * size, prod(piece.shape) * size
            target = None if plain is None else self._memory.narrow(0, plain + offset, length)
            jobs.append(Job(self, piece, start + offset, length, target))
        self._left = len(jobs)
        return jobs

    def _plain_start(self) -> int | None:
        """Return the offset in the parameter of the tensor's first byte, None if bytes or their order differ."""
        slot, parameter = self.slot, self.slot.parameter
        if slot.transform is not None or slot.dim or (slot.source is not None and slot.source.dim):
            return None
        if parameter.dtype != self.dtype or not parameter.is_contiguous():
            return None
        skipped = 0 if slot.source is None else slot.source.start * prod(self.stored.shape[1:])
        return (slot.start * prod(parameter.shape[1:]) - skipped) * self.dtype.itemsize

    def part(self) -> Tensor:
        """Return the tensor that receives the pieces."""
        if self.slot.transform is None:
            return self.slot.target
        with self._lock:
            if self._part is None:
                self._part = torch.empty(self._part_shape(), dtype=self.dtype, device=self.slot.target.device)
            return self._part

    def end_piece(self) -> None:
        """Count a piece as copied, and transform the tensor with the last one.

        Raises ConfigError if the transform does not yield the shape of the slot's region.
        """
        if self.slot.transform is None:
            return
        with self._lock:
            self._left -= 1
            left = self._left
        if left == 0:
            self.slot.fill(self.part())
            if self.slot.target.is_cuda:
                # The allocator may give the tensor's memory to another thread's stream.
                torch.cuda.current_stream(self.slot.target.device).synchronize()
            self._part = None

    def _part_shape(self) -> tuple[int, ...]:
        source, shape = self.slot.source, self.stored.shape
        if source is None:
            return shape
        return (*shape[: source.dim], source.stop - source.start, *shape[source.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Job:
    """A piece to read into a slot."""

    filling: Filling
    piece: Piece
    start: int
    """Offset of the first byte in the file."""
    nbytes: int
    """Number of bytes to read."""
    plain: Tensor | None
    """The bytes of the parameter that are those of the file; None: they differ in dtype or order.

    Views are made before threads read, as they contend for the interpreter.
    """

    def target(self) -> Tensor:
        """Return the view that the piece fills."""
        return self.filling.part()[self.piece.index]

    def read(self, buffer: memoryview) -> None:
        """Fill a buffer of `nbytes` bytes.

        Raises ConfigError if the file cannot be read.
        """
        self.filling.file.read_into(buffer, self.start)

    def view(self, buffer: Tensor) -> Tensor:
        """Return a view of the bytes that were read, in the shape of the target."""
        return buffer.view(self.filling.dtype).view(self.piece.shape)[self.piece.window]


@dataclass(frozen=True, slots=True)
class Span:
    """Adjacent pieces of a file, which are read at once. Experts have thousands of small tensors."""

    jobs: list[Job]
    start: int
    """Offset of the first byte in the file."""
    nbytes: int

    def read(self, buffer: memoryview) -> None:
        """Fill a buffer of `nbytes` bytes, as `Job.read` does."""
        self.jobs[0].filling.file.read_into(buffer, self.start)


def spans(jobs: Iterable[Job], nbytes: int) -> Iterator[Span]:
    """Yield the jobs of each file in its order, grouped to spans of at most `nbytes` bytes.

    Each job begins at a multiple of its element's size within the span, as views of the bytes need.
    """
    group: list[Job] = []
    start = end = 0
    file: SourceFile | None = None
    for job in sorted(jobs, key=lambda job: (str(job.filling.file.path), job.start)):
        fits = job.start == end and job.start + job.nbytes - start <= nbytes
        if not fits or job.filling.file is not file or (job.start - start) % job.filling.dtype.itemsize:
            if group:
                yield Span(group, start, end - start)
            group, start, file = [], job.start, job.filling.file
        group.append(job)
        end = job.start + job.nbytes
    if group:
        yield Span(group, start, end - start)
