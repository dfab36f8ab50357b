"""The engine's end of a worker: process, channel and slots."""

import logging
import os
import subprocess
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec

from tandem.engine_core.constraints.workers.channel import (
    CLOSE,
    DROP,
    MAX_OPERATIONS,
    MAX_SLOTS,
    OPEN,
    Channel,
    create_memory,
    map_memory,
)
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.settings import WorkerFacts, WorkerSettings
from tandem.engine_core.errors import RequestError
from tandem.protocol.errors import ErrorCode

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
"""Timeout of a batch, in seconds. Then the worker is killed, and the engine advances its grammars itself."""
COMPILE_SECONDS = 10.0
"""Timeout of a compilation, in seconds."""
VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
"""Environment variables passed to workers; excludes secrets."""
_CHECK_EVERY = 256
"""Number of polls between checks of the clock and the process."""


class Process(Protocol):
    """Interface of a worker process."""

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


class WorkerLink:
    """The engine's end of one worker.

    Only `compile`, `close_slot` and `drop` may be called outside the loop's thread.
    """

    def __init__(self, channel: Channel, connection: Connection, process: Process, clock: Callable[[], float]) -> None:
        self.channel = channel
        self.number = 0
        """Index of the worker in its pool."""
        self.is_lost = False
        """True once the worker is gone, with the state of its matchers."""
        self._num_refused = self._num_ending = self._num_flagged = 0
        """The channel's counters at the last `take_*` call."""
        self.on_lost: Callable[[], None] = lambda: None
        """Callback for the loss of the worker."""
        self.num_given_back = 0
        """Number of matchers that moved back to the engine."""
        self._connection = connection
        self._process = process
        self._clock = clock
        self.pending: array[int] = array("i")
        """Operations of the next batch, three ints each."""
        self.is_awaited = False
        """True if the result of one of them is waited for; the others can go with a later batch."""
        self.num_posts = 0
        """Number of batches sent."""
        self._free = list(range(MAX_SLOTS))
        self._closed: deque[int] = deque()
        self._dropped: deque[int] = deque()
        """Released slots and grammars; appended by finalizers on any thread, at any time."""
        self._is_silent = False
        """True once a compilation timed out or the worker is gone; it then gets no more grammars."""
        self._compiling = threading.Lock()
        self.num_grammars = 0
        """Number of grammars sent to the worker."""

    @classmethod
    def start(cls, facts: WorkerFacts, masks: MaskMemory) -> "WorkerLink":
        """Start a worker that maps the current arrays of `masks`.

        Raises OSError if the process cannot be started.
        """
        with ExitStack() as temporary, ExitStack() as kept:
            memory_fd = create_memory()
            temporary.callback(os.close, memory_fd)
            channel = Channel(map_memory(memory_fd), os.eventfd(0))
            kept.callback(channel.close)
            ours, theirs = Pipe()
            kept.callback(ours.close)
            temporary.callback(theirs.close)
            settings = WorkerSettings(facts, theirs.fileno(), memory_fd, channel.wake_fd, masks.fds)
            command = [sys.executable, "-P", "-m", "tandem.engine_core.constraints.workers.worker"]
            process = subprocess.Popen(
                [*command, msgspec.json.encode(settings).decode()],
                stdin=subprocess.DEVNULL,
                pass_fds=(settings.connection_fd, memory_fd, channel.wake_fd, *settings.mask_fds),
                process_group=0,
                env={name: text for name in VARIABLES if (text := os.environ.get(name)) is not None},
            )
            kept.pop_all()
        return cls(channel, ours, process, time.monotonic)

    @property
    def num_open(self) -> int:
        """Return the number of open matchers on the worker."""
        return MAX_SLOTS - len(self._free) - len(self._closed)

    @property
    def has_room(self) -> bool:
        """Return True if another matcher can be opened."""
        return not (self.is_lost or self._is_silent) and self.num_open < MAX_SLOTS

    def compile(self, text: str) -> int | None:
        """Compile a grammar on the worker and return its number there.

        Thread-safe. Returns None if the worker does not answer; `has_room` is False from then on.

        Raises RequestError if the grammar does not compile, which is unexpected after the engine compiled it.
        """
        with self._compiling:
            if self.is_lost or self._is_silent:
                return None
            self.num_grammars += 1
            try:
                self._connection.send_bytes(msgspec.msgpack.encode((self.num_grammars, text)))
                if not self._connection.poll(COMPILE_SECONDS):
                    self._give_up(f"did not compile a grammar within {COMPILE_SECONDS:g} s")
                    return None
                problem = self._connection.recv_bytes().decode()
            except (EOFError, OSError) as error:
                self._give_up(f"is gone ({type(error).__name__})")
                return None
            if problem:
                raise RequestError(ErrorCode.INVALID_GRAMMAR, problem)
            return self.num_grammars

    def open(self, grammar: int) -> int:
        """Open a matcher of a grammar and return its slot."""
        self._collect()
        slot = self._free.pop()
        self.pending.extend((OPEN, slot, grammar))
        return slot

    def enqueue(self, operations: bytes) -> None:
        """Add operations to the next batch, which is awaited.

        operations: three int32 numbers each. Operations enqueued until the next `post` share a batch: a second
        batch would be sent only after the tokens that the first expects have arrived.
        """
        if not self.is_awaited and len(self.pending) > 3 * (MAX_OPERATIONS - 2 * MAX_SLOTS):
            self.post()
        self.pending.frombytes(operations)
        self.is_awaited = True

    def close_slot(self, slot: int) -> None:
        """Clear a slot. Thread-safe."""
        self._closed.append(slot)

    def drop(self, grammar: int) -> None:
        """Delete a grammar. Thread-safe."""
        self._dropped.append(grammar)

    def post(self) -> None:
        """Send the pending operations.

        If they exceed a batch, waits for all batches but the last.
        """
        self._collect()
        self.is_awaited = False
        if not self.pending:
            return
        self.wait()
        while self.pending and not self.is_lost:
            batch = self.pending if len(self.pending) <= 3 * MAX_OPERATIONS else self.pending[: 3 * MAX_OPERATIONS]
            self.channel.post(batch)
            self.num_posts += 1
            self.pending = self.pending[len(batch) :]
            if self.pending:
                self.wait()
        if self.is_lost:
            del self.pending[:]

    def wait_accepted(self) -> None:
        """Wait until the worker has finished all operations before masks, or is lost."""
        if not self.channel.has_accepted:
            self._wait(lambda channel: channel.has_accepted)

    def wait(self) -> None:
        """Wait until the worker has finished all operations, or is lost."""
        if not self.channel.is_done:
            self._wait(lambda channel: channel.is_done)

    def take_refused(self) -> bool:
        """Return True if the worker has refused a mask since the last call, or is lost."""
        before, self._num_refused = self._num_refused, self.channel.num_refused
        return self.is_lost or self._num_refused != before

    def take_ending(self) -> bool:
        """Return True if a mask written since the last call allows an end id."""
        before, self._num_ending = self._num_ending, self.channel.num_ending
        return self._num_ending != before

    def take_flagged(self) -> bool:
        """Return True if there were flagged tokens since the last call."""
        before, self._num_flagged = self._num_flagged, self.channel.num_flagged
        return self._num_flagged != before

    def _wait(self, is_over: Callable[[Channel], bool]) -> None:
        channel, polls, since = self.channel, 0, 0.0
        while not self.is_lost and not is_over(channel):
            time.sleep(0)  # lets other threads run
            polls += 1
            if polls % _CHECK_EVERY == 0:
                now = self._clock()
                since = since or now
                if self._process.poll() is not None:
                    self.lose(f"ended with code {self._process.poll()}")
                elif now - since > ANSWER_SECONDS:
                    self.lose(f"did not answer within {ANSWER_SECONDS:g} s")

    def post_and_wait(self) -> None:
        """Send the pending operations and wait for their results."""
        self.post()
        self.wait()

    @property
    def is_idle_and_silent(self) -> bool:
        """Return True if the worker does not answer and has no open matchers."""
        return self._is_silent and not self.is_lost and not self.num_open

    def lose(self, why: str) -> None:
        """Mark the worker as lost and kill it."""
        logger.error("a worker for grammars %s; the engine follows the grammars that it had", why)
        self.close()
        self.on_lost()

    def close(self) -> None:
        """End the worker's process."""
        self.is_lost = True
        self._process.kill()
        self._process.wait()
        with self._compiling:  # a compiling thread holds it until the process has ended
            self._connection.close()
        self.channel.close()

    def _collect(self) -> None:
        """Add CLOSE and DROP operations of released slots and grammars to the next batch."""
        while self._dropped:
            self.pending.extend((DROP, self._dropped.popleft(), 0))
        while self._closed:
            slot = self._closed.popleft()
            self.pending.extend((CLOSE, slot, 0))
            self._free.append(slot)

    def _give_up(self, why: str) -> None:
        """Send the worker no more grammars."""
        self._is_silent = True
        if not self.is_lost:
            logger.error("a worker for grammars %s, and gets no more of them", why)
