"""Streams, events and pinned memory, real on CUDA and inert on a CPU.

The runtime is written once, against these.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, Protocol
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine_core.contracts import DeviceTimes
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.tiles.table_file import load_table
from tandem.engine_core.runtime.cuda_streams import CudaEvent, CurrentStream, SideStream

logger = logging.getLogger(__name__)

TIMING_INTERVAL = 7
"""Steps from one timed step to the next; an odd number, since steps with prompts often take turns with others."""


class Instant(Protocol):
    """A point in the compute stream, with its time."""

    def record(self) -> None:
        """Mark the current end of the stream."""

    def elapsed_time(self, later: Any) -> float:
        """Return the milliseconds from this mark to a later one.

        Both have been reached.
        """


class StepClock:
    """Timer of one step in TIMING_INTERVAL, and of the gap after it.

    It times step n on the device from the beginning of its forward pass to the end of its sampling, and the gap from
    there to the forward pass of step n + 1. Updates of tables before a forward pass, some microseconds, count to the
    gap, and so does the time between forward pass and sampling in which a step waits for its masks: the
    host computes them, and copies them right before the sampling. `read` is called once the step's results are on the
    host: by then its events, and all before them, have been reached.
    """

    def __init__(self, event: Callable[[], Instant]) -> None:
        self.times = DeviceTimes()
        self._started, self._ended, self._next = event(), event(), event()
        self._paused, self._resumed = event(), event()
        self._timed = -1
        self._gap = self._waits = False

    def begin(self, step_id: int, follows: bool) -> None:
        """Mark the beginning of a step's forward pass.

        follows: True if the step before was still in flight or has only just been collected.
        """
        if step_id % TIMING_INTERVAL == 0:
            self._started.record()
            self._timed, self._gap, self._waits = step_id, False, False
        elif step_id == self._timed + 1 and follows:
            self._next.record()
            self._gap = True

    def pause(self, step_id: int) -> None:
        """Mark the end of the forward pass of a step that waits for its masks."""
        if step_id == self._timed:
            self._paused.record()

    def resume(self, step_id: int) -> None:
        """Mark the beginning of the sampling of such a step.

        Its masks are on the device by then.
        """
        if step_id == self._timed:
            self._resumed.record()
            self._waits = True

    def end(self, step_id: int) -> None:
        """Mark the end of a step's sampling."""
        if step_id == self._timed:
            self._ended.record()

    def read(self, step_id: int) -> float:
        """Return the milliseconds that the device worked on a collected step.

        They are 0 if it was not timed. The times of a pair of steps are added once the step after the timed one has
        been collected.
        """
        if step_id == self._timed:
            return self._busy()
        if step_id == self._timed + 1 and self._gap:
            waited = self._paused.elapsed_time(self._resumed) if self._waits else 0.0
            self.times.busy += self._busy() / 1000
            self.times.idle += (max(0.0, self._ended.elapsed_time(self._next)) + max(0.0, waited)) / 1000
            self.times.steps += 1
            self._gap = False
        return 0.0

    def _busy(self) -> float:
        """Return the milliseconds of the timed step's forward pass and sampling."""
        if not self._waits:
            return self._started.elapsed_time(self._ended)
        return self._started.elapsed_time(self._paused) + self._resumed.elapsed_time(self._ended)


class Event(Protocol):
    """A point in a stream."""

    def record(self) -> None:
        """Mark the current end of the current stream."""

    def wait(self) -> None:
        """Make the current stream wait for the mark."""

    def synchronize(self) -> None:
        """Make the host wait for the mark."""


class Device(Protocol):
    """One device and its three streams (I1).

    The compute stream is current outside of `upload` and `copy`.
    """

    kind: Literal["cpu", "cuda"]
    """Name of the device as in `--device`."""
    torch_device: torch.device

    def upload(self) -> AbstractContextManager[Any]:
        """Return a context in which the upload stream is current."""

    def copy(self) -> AbstractContextManager[Any]:
        """Return a context in which the copy stream is current."""

    def event(self) -> Event: ...

    def host_buffer(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Allocate zeroed host memory.

        Copies between it and the device do not synchronise.
        """

    def pin(self, memory: NDArray[np.int32]) -> bool:
        """Pin host memory for as long as the array is in use.

        Return whether that was possible.
        """

    def synchronize(self) -> None: ...

    def free_bytes(self) -> int:
        """Return the bytes that could still be allocated."""

    def total_bytes(self) -> int:
        """Return the bytes of the device's whole memory."""

    def held_bytes(self) -> int:
        """Return the bytes that this process holds."""

    def release_unused(self) -> None:
        """Release the memory that the allocator caches."""

    def instant(self) -> Instant:
        """Return a new mark of time, not recorded yet."""


class InertEvent:
    """Implement `Event` on a CPU, where all work is done by the time a call returns."""

    def record(self) -> None:
        return None

    def wait(self) -> None:
        return None

    def synchronize(self) -> None:
        return None


class HostInstant:
    """A moment on the host, with the interface of a CUDA event with timing."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        """Keep the present time."""
        self.seconds = time.perf_counter()

    def elapsed_time(self, later: "HostInstant") -> float:
        """Return the milliseconds until a later moment."""
        return 1000 * (later.seconds - self.seconds)


class CpuDevice:
    """Implement `Device` on a CPU, which runs everything at once and in order."""

    kind: Literal["cpu", "cuda"] = "cpu"

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def upload(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def copy(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def event(self) -> Event:
        return InertEvent()

    def host_buffer(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def pin(self, memory: NDArray[np.int32]) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def free_bytes(self) -> int:
        return min(_available(), _cgroup_room())

    def total_bytes(self) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def held_bytes(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def release_unused(self) -> None:
        return None

    def instant(self) -> Instant:
        return HostInstant()


class CudaDevice:
    """Implement `Device` by the current CUDA device.

    Its compute stream stays current on the thread that opened it; see `open_device`.
    """

    kind: Literal["cpu", "cuda"] = "cuda"

    def __init__(self, compute: torch.cuda.Stream, upload: torch.cuda.Stream, copy: torch.cuda.Stream) -> None:
        self.torch_device = torch.device("cuda", compute.device_index)
        self._current = CurrentStream(compute)
        self._upload = SideStream(self._current, upload)
        self._copy = SideStream(self._current, copy)

    def upload(self) -> AbstractContextManager[Any]:
        return self._upload

    def copy(self) -> AbstractContextManager[Any]:
        return self._copy

    def event(self) -> Event:
        return CudaEvent(self._current)

    def host_buffer(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def pin(self, memory: NDArray[np.int32]) -> bool:
        cudart, address = torch.cuda.cudart(), memory.ctypes.data  # type: ignore[no-untyped-call]
        code = int(cudart.cudaHostRegister(address, memory.nbytes, 0))
        if code == 0:
            # Pages that are unmapped while they are registered would be taken for those mapped at their address next.
            finalize(memory, cudart.cudaHostUnregister, address).atexit = False
            return True
        logger.warning(
            "%d bytes of main memory are not pinned (CUDA error %d): copies take longer",
            memory.nbytes,
            code,
        )
        with suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device)  # takes the error, which a later call would raise
        return False

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free

    def total_bytes(self) -> int:
        _, total = torch.cuda.mem_get_info(self.torch_device)
        return total

    def held_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.torch_device)

    def release_unused(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()

    def instant(self) -> Instant:
        return CudaEvent(self._current, timed=True)


def _available() -> int:
    """Return the bytes that the operating system could allocate, page cache included."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_room(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that a container's memory limit leaves, with page cache that was not used lately.

    Without a limit, return `sys.maxsize`.
    """
    try:
        limit, used = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return sys.maxsize
    used -= int(fields.get("inactive_file", 0))
    return sys.maxsize if limit == "max" else max(0, int(limit) - used)


def read_gpu_traits() -> GpuTraits:
    """Read the traits of the current CUDA device, with its tile table.

    No other function queries the kind of CUDA device. Raises ValueError if the table is malformed.
    """
    found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return GpuTraits(
        name=found.name,
        capability=(found.major, found.minor),
        multiprocessors=found.multi_processor_count,
        shared_memory=found.shared_memory_per_block_optin,
        tiles=load_table(found.name),
    )


def open_device(kind: str) -> Device:
    """Open the device of a resolved kind, "cpu" or "cuda".

    On CUDA this makes the compute stream current on this thread permanently: switching at each call would cost
    microseconds per step. Engines of one thread share that stream, as kernels share counters and need their launches in
    order.
    """
    if kind == "cuda":
        compute = torch.cuda.current_stream()
        if compute == torch.cuda.default_stream():
            compute = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            torch.cuda.set_stream(compute)
        return CudaDevice(compute, torch.cuda.Stream(), torch.cuda.Stream())  # type: ignore[no-untyped-call]
    return CpuDevice()
