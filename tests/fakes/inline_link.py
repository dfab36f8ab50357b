"""A worker for grammars without a process: its operations are done as they are posted."""

import os
from array import array
from collections.abc import Callable

from tandem.engine_core.constraints.matchers import Matchers
from tandem.engine_core.constraints.workers.channel import Channel, create_memory, map_memory
from tandem.engine_core.constraints.workers.link import WorkerLink
from tandem.engine_core.constraints.workers.mask_memory import MappedMasks, MaskMemory
from tandem.engine_core.constraints.workers.worker import Worker
from tests.fakes.clock import FakeClock


class NoConnection:
    """Unused connection."""

    def close(self) -> None:
        return None


class NoProcess:
    """Process that runs until it is killed, or a test sets its code."""

    code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        if self.code is None:
            self.code = -9

    def wait(self) -> int:
        assert self.code is not None, "a process that runs is waited for"
        return self.code


class InlineChannel(Channel):
    """The engine's side of a channel, over which a worker does each batch while it is posted."""

    do_next: Callable[[], None] = staticmethod(lambda: None)

    def post(self, operations: "array[int]") -> None:
        super().post(operations)
        self.do_next()


class InlineLink(WorkerLink):
    """Link to a worker in this process."""

    def __init__(self, grammars: Matchers, masks: MaskMemory, clock: Callable[[], float] | None = None) -> None:
        """Map the masks, which must be allocated already.

        clock: seconds, of the link and of the worker.
        """
        memory_fd, wake_fd = create_memory(), os.eventfd(0)
        channel, theirs = InlineChannel(map_memory(memory_fd), wake_fd), Channel(map_memory(memory_fd), wake_fd)
        os.close(memory_fd)
        clock = clock or FakeClock()
        self.process = NoProcess()
        super().__init__(channel, NoConnection(), self.process, clock)  # type: ignore[arg-type]
        self.grammars = grammars
        self.compiled: list[str] = []
        self.worker = Worker(
            theirs, MappedMasks(masks.fds, 4 * -(-grammars.vocab_size // 32), grammars.end_ids), clock, clock
        )
        self.inline = channel
        channel.do_next = self.worker.do_next

    def compile(self, text: str) -> int | None:
        self.compiled.append(text)
        self.num_grammars += 1
        self.worker.grammars[len(self.compiled)] = self.grammars.matcher(text)
        return len(self.compiled)

    def end(self) -> None:
        """Let the process have ended without anyone having noticed."""
        self.process.code = 1
        self.inline.do_next = lambda: None
