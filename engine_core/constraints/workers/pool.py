"""Pool of workers, which advance the grammars that many requests share."""

import logging
import threading
import time
from collections.abc import Callable, Collection

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from tandem.engine_core.constraints.workers.channel import MAX_SLOTS, SLOT_BITS
from tandem.engine_core.constraints.workers.link import WorkerLink
from tandem.engine_core.constraints.workers.mask_memory import Ints
from tandem.engine_core.constraints.workers.remote_matcher import RemoteGrammar
from tandem.protocol.stats import EngineStats

logger = logging.getLogger(__name__)

RESTART_SECONDS = 30.0
"""Minimum interval between starts, in seconds, so that a worker that keeps failing does not occupy a core."""


class Part(Struct, frozen=True):
    """Matchers of one worker, out of many matchers."""

    link: WorkerLink
    indices: NDArray[np.intp]
    """Indices of its matchers in the caller's order."""
    slots: Ints
    """Their slots."""


class PlacedPart(Part, frozen=True):
    """Matchers of one worker, and their range in the order of `Shares`."""

    start: int
    end: int


class Batch(Part, frozen=True):
    """Operations of one worker, out of an operation on many matchers."""

    operations: bytes
    """Encoded operations, three int32 each."""
    num_given_back: int
    """`WorkerLink.num_given_back` when the batch was created."""


class Shares(Struct, frozen=True):
    """Matchers sorted by worker."""

    key: bytes
    """Their `RemoteMatcher.id`, in the caller's order."""
    order: NDArray[np.intp]
    """Their indices in the caller's order."""
    slots: Ints
    parts: list[PlacedPart]


def are_current(batches: list[Batch]) -> bool:
    """Return True if the workers still have all matchers of some batches."""
    return all(batch.link.num_given_back == batch.num_given_back for batch in batches)


class WorkerPool:
    """Up to `count` workers, started when the first grammar needs them.

    Lost workers are replaced when the next grammar needs a worker.
    """

    def __init__(
        self,
        count: int,
        start_link: Callable[[], WorkerLink],
        stats: EngineStats | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep the parts of a pool.

        start_link: starts a worker, may raise OSError; stats: updated with worker counts; clock: seconds.
        """
        self.count = count
        self._start_link = start_link
        self._stats = stats or EngineStats()
        self._clock = clock
        self._links: list[WorkerLink] = []
        """Running workers, and lost ones with open matchers.

        Replaced, never mutated, because the loop iterates over it."""
        self._num_started = 0
        self._tried_at: float | None = None
        """Time of the last start, in seconds."""
        self._starting = threading.Lock()
        self._is_closed = False
        self._shares: Shares | None = None
        """Cached result of the last step: consecutive steps have nearly the same matchers."""

    def compile(self, text: str, taken: Collection[WorkerLink]) -> RemoteGrammar | None:
        """Compile a grammar on a worker that is not in `taken`.

        Prefers the worker with the fewest matchers, then the fewest grammars. Runs on any thread except the loop's.
        Returns None if all workers with room are taken or do not answer.

        Raises RequestError if the worker cannot compile it.
        """
        with self._starting:
            if self._may_start:
                self._start_missing()
        free = [link for link in self._links if link.has_room and link not in taken]
        # Several grammars may be compiled before the first matcher of any is opened.
        for link in sorted(free, key=lambda link: (link.num_open, link.num_grammars)):
            number = link.compile(text)
            if number is not None:
                return RemoteGrammar(link, number)
        return None

    def has_free(self, taken: Collection[WorkerLink]) -> bool:
        """Return True if `compile` may find a worker or start one."""
        return self._may_start or any(link.has_room and link not in taken for link in self._links)

    def give_up_silent(self) -> None:
        """Drop the workers that do not answer and have no open matchers.

        Called on the loop's thread.
        """
        for link in self._links:
            if link.is_idle_and_silent:
                link.lose("does not answer")

    def post_awaited(self) -> None:
        """Send the batches with awaited results.

        Others go with a later batch: a worker accepts a batch only after finishing the previous one.
        """
        for link in self._links:
            if link.is_awaited:
                link.post()

    def enqueue(self, operation: int, ids: Ints, values: Ints) -> list[Batch]:
        """Add an operation on many matchers to the workers' next batches.

        ids: values of `RemoteMatcher.id`; negative ids belong to no worker; values: second operand of each operation.
        Returns one batch per worker.
        """
        shares = self._shares
        if shares is None or shares.key != ids.tobytes():
            shares = self._shares = self._share(ids)
        rows = np.empty((len(ids), 3), dtype=np.int32)
        rows[:, 0], rows[:, 1], rows[:, 2] = operation, shares.slots, values[shares.order]
        batches = [
            Batch(
                part.link,
                part.indices,
                part.slots,
                rows[part.start : part.end].tobytes(),
                part.link.num_given_back,
            )
            for part in shares.parts
        ]
        self.repeat(batches)
        return batches

    def repeat(self, batches: list[Batch]) -> None:
        """Add the same operations again; `are_current(batches)` must be True."""
        for batch in batches:
            batch.link.enqueue(batch.operations)

    def _share(self, ids: Ints) -> Shares:
        """Group matchers by worker."""
        order = np.argsort(ids, kind="stable")
        ordered = ids[order]
        slots = ordered & MAX_SLOTS - 1
        links = self._links
        bounds = [number << SLOT_BITS for link in links for number in (link.number, link.number + 1)]
        offsets = np.searchsorted(ordered, bounds).tolist()
        parts = [
            PlacedPart(link, order[start:end], slots[start:end], start, end)
            for link, start, end in zip(links, offsets[0::2], offsets[1::2], strict=True)
            if start < end
        ]
        return Shares(ids.tobytes(), order, slots, parts)

    def wait_accepted(self) -> None:
        """Wait until all workers have finished the operations before masks."""
        for link in self._links:
            link.wait_accepted()

    def wait(self) -> None:
        """Wait until all workers have finished all operations."""
        for link in self._links:
            link.wait()

    def take_refused(self) -> bool:
        """Return True if a worker has refused a mask since the last call, or is lost."""
        refused = [link.take_refused() for link in self._links]
        return any(refused)

    def take_ending(self) -> bool:
        """Return True if a mask written since the last call allows an end id."""
        ending = [link.take_ending() for link in self._links]
        return any(ending)

    def close(self) -> None:
        """End all workers."""
        with self._starting:
            self._is_closed = True
            for link in self._links:
                link.close()

    def _start_missing(self) -> None:
        """Start all workers; on later calls, start one missing worker.

        Removes lost workers without matchers.
        """
        count = self.count if self._tried_at is None else 1
        links, self._tried_at = [link for link in self._links if not link.is_lost or link.num_open], self._clock()
        problem = ""
        try:
            for _ in range(count):
                links.append(self._new_link())
        except OSError as error:
            problem = str(error)
        self._links = links
        if problem:
            text = "%d of %d workers for grammars could be started: %s; the engine follows other grammars itself"
            logger.error(text, self._num_running, self.count, problem)
        else:
            logger.info("%d workers follow the grammars that many requests share", self._num_running)

    def update_stats(self) -> None:
        """Count the running workers; called on the loop's thread."""
        self._stats.grammar_workers = self._num_running

    @property
    def _num_running(self) -> int:
        return sum([not link.is_lost for link in self._links])

    @property
    def _may_start(self) -> bool:
        is_due = self._tried_at is None or self._clock() - self._tried_at >= RESTART_SECONDS
        return is_due and not self._is_closed and self._num_running < self.count

    def _new_link(self) -> WorkerLink:
        """Start a worker.

        Raises OSError if the process cannot be started.
        """
        link = self._start_link()
        link.number, link.on_lost = self._num_started, self._on_lost
        self._num_started += 1
        return link

    def _on_lost(self) -> None:
        self._stats.grammar_workers_lost += 1
        self.update_stats()
