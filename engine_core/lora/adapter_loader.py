"""Reading of adapters, and their copies into slots of the device, on threads of its own."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from threading import Barrier
from typing import TypeVar

import torch

from tandem.engine_core.contracts import LoadResult
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.layers.lora_linear import LayerUpdate, LoraLinear, LoraSlots
from tandem.engine_core.loader.transfer import single_threaded_torch
from tandem.engine_core.lora.adapter_files import HostAdapter, read_adapter
from tandem.engine_core.lora.adapter_folder import Stamp, file_stamp

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

READERS = 2
"""Threads that read the layers of an adapter; all of them and the loop need the interpreter."""
STAGING_BUFFERS = 2
"""Page-locked buffers of copies to a GPU: one is filled while the other is copied."""


class SideCopies:
    """Copies to a GPU on a stream of their own, which overlap with steps.

    Updates pass through page-locked buffers that are allocated at the start, so that no memory is page-locked while
    steps run.
    """

    def __init__(self, device: torch.device, slots: LoraSlots) -> None:
        """Allocate buffers for one layer each. slots: those that are filled."""
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        size = slots.max_update_bytes
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(STAGING_BUFFERS)]
        self._events = [torch.cuda.Event() for _ in range(STAGING_BUFFERS)]  # type: ignore[no-untyped-call]

    def stream(self) -> AbstractContextManager[object]:
        """Return a context in which copies go to the stream."""
        return torch.cuda.stream(self._stream)

    def fill(self, linears: Mapping[str, LoraLinear], slot: int, updates: Mapping[str, LayerUpdate]) -> None:
        """Copy an adapter into a slot, and wait until that is done. The stream must be the current one."""
        turns = cycle(zip(self._buffers, self._events, strict=True))
        try:
            for (name, linear), (buffer, event) in zip(linears.items(), turns, strict=False):
                update = updates.get(name)
                if update is not None:
                    event.synchronize()
                    update = update.copied_to(buffer)
                linear.fill(slot, update)
                event.record(self._stream)
        finally:
            # Also after an error: the next adapter overwrites the buffers.
            self._stream.synchronize()


class ThreadedLoader:
    """Implement `contracts.AdapterLoader`.

    At most `max_cached` adapters stay in host memory; the least recently used are read again from their files when a
    slot needs them. `read` and `place` start work on the thread, and `wake` is called there with each result.
    """

    def __init__(
        self,
        slots: LoraSlots,
        max_cached: int,
        wake: Callable[[], None],
        copies: SideCopies | None = None,
    ) -> None:
        """Start the thread. copies: to a GPU; None: the slots are in host memory."""
        self.slots = slots
        self.max_cached = max_cached
        self.wake = wake
        self.copies = copies
        # Matrices are too small for more threads, which would wait for cores that the loop or a model on the host uses.
        with single_threaded_torch():
            self._thread, self._readers = _threads("adapters", 1), _threads("adapter-reader", READERS)
        self._results: SimpleQueue[LoadResult] = SimpleQueue()
        self._cached: OrderedDict[int, HostAdapter] = OrderedDict()
        """Adapters in host memory by version, the least recently used first; used on the thread only."""
        self._stamps: dict[int, Stamp] = {}
        """Stamp of the files of each version that was read; used on the thread only."""

    def read(self, version: int, path: str, root: str) -> None:
        self._thread.submit(self._run, version, 0, lambda: self._read(version, path, root))

    def place(self, version: int, path: str, slot: int) -> None:
        self._thread.submit(self._run, version, slot, lambda: self._place(version, path, slot))

    def drop(self, version: int) -> None:
        self._thread.submit(self._drop, version)

    def take_results(self) -> list[LoadResult]:
        found = []
        while not self._results.empty():
            found.append(self._results.get())
        return found

    def wait(self) -> None:
        """Wait until all work is done."""
        self._thread.submit(int).result()

    def read_now(self, version: int, path: str, root: str = "") -> int:
        """Read an adapter before the loop runs; return its rank. Raises ConfigError if it cannot be used."""
        return self._thread.submit(self._read, version, path, root).result()

    def _run(self, version: int, slot: int, work: Callable[[], int]) -> None:
        problem, rank = "", 0
        try:
            rank = work()
        except ConfigError as error:
            problem = str(error)
        except Exception as error:
            logger.exception("an adapter could not be loaded")
            problem = f"{type(error).__name__}: {error}"
        self._results.put(LoadResult(version, slot, rank, problem))
        self.wake()

    def _read(self, version: int, path: str, root: str) -> int:
        below = Path(root) if root else None
        with self._context():
            found = read_adapter(Path(path), self.slots, below, self._run_readers)
        self._stamps[version] = found.stamp
        self._keep(version, found)
        return found.rank

    def _place(self, version: int, path: str, slot: int) -> int:
        found = self._cached.get(version)
        with self._context():
            if found is None:
                stamp = self._stamps[version]
                if file_stamp(Path(path)) == stamp:
                    found = read_adapter(Path(path), self.slots, run=self._run_readers)
                if found is None or found.stamp != stamp:
                    raise ConfigError(
                        f"the files in {path} have changed since they were loaded; load the adapter again"
                    )
            self._keep(version, found)
            if self.copies is None:
                self.slots.fill(slot, found.updates)
            else:
                self.copies.fill(self.slots.linears, slot, found.updates)
        return found.rank

    def _run_readers(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Implement `adapter_files.Run`."""

        def call(item: T) -> R:
            with self._context():
                return function(item)

        futures = [self._readers.submit(call, item) for item in items]
        wait(futures)
        return [future.result() for future in futures]

    @contextmanager
    def _context(self) -> Iterator[None]:
        """Let torch copy in the stream of its own: in that of the steps, a copy would wait for those in flight."""
        with self.copies.stream() if self.copies is not None else nullcontext(), torch.inference_mode():
            yield

    def _keep(self, version: int, found: HostAdapter) -> None:
        self._cached[version] = found
        self._cached.move_to_end(version)
        while len(self._cached) > self.max_cached:
            self._cached.popitem(last=False)

    def _drop(self, version: int) -> None:
        self._cached.pop(version, None)
        self._stamps.pop(version, None)


def _threads(name: str, count: int) -> ThreadPoolExecutor:
    """Return an executor with all its threads started, which have the current number of torch's threads from then."""
    executor, started = ThreadPoolExecutor(count, name), Barrier(count)

    def start(_: int) -> None:
        torch.get_num_threads()
        started.wait()

    list(executor.map(start, range(count)))
    return executor
