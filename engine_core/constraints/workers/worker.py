"""Worker process that advances grammars and fills masks for the engine's loop.

    python -m tandem.engine_core.constraints.workers.worker SETTINGS

It holds one matcher per slot and executes one batch of operations at a time. A second thread compiles grammars. The
process ends with the engine.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import msgspec
from llguidance import LLMatcher

from tandem.engine_core.constraints.mask_budget import FREE_SECONDS
from tandem.engine_core.constraints.matchers import Matchers, reason
from tandem.engine_core.constraints.workers.channel import (
    ACCEPT,
    ACCEPTED,
    AWAKE_SECONDS,
    CLOSE,
    ENDS_FORCED,
    EXPECT,
    FAILED,
    FORCES,
    FORCES_MORE,
    MASK,
    MAX_FORCED,
    OPEN,
    STOPPED,
    TAKE,
    Channel,
    map_memory,
)
from tandem.engine_core.constraints.workers.mask_memory import MappedMasks
from tandem.engine_core.constraints.workers.settings import WorkerSettings
from tandem.engine_core.contracts import NO_TOKEN, PENDING_TOKEN
from tandem.engine_core.errors import RequestError

SLOW_SECONDS = 0.05
"""CPU time of a matcher's slow masks in total, in seconds, after which its grammar returns to the engine. That enforces
the budgets of requests and keys. As in the engine, masks up to FREE_SECONDS are free and pay off earlier ones. Masks of
ordinary grammars take a few milliseconds while their tables are cold."""
BATCH_SECONDS = 0.1
"""Time limit of a batch, in seconds, after which its remaining masks are refused and computed by the engine."""
NAP_SECONDS = 0.0001
"""Polling interval for a token of a long step, in seconds."""
SWITCH_SECONDS = 0.0005
"""Switch interval of the interpreter, in seconds, so that the compiling thread does not delay masks."""


class Worker:
    """Execute operations on matchers by slot and grammars by number."""

    def __init__(
        self,
        channel: Channel,
        masks: MappedMasks,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Keep the parts of a worker.

        clock: seconds, measures masks and batches; cpu_clock: CPU time in seconds of the calling thread, measures masks
        that seem slow.
        """
        self.channel = channel
        self.masks = masks
        self.clock = clock
        self.cpu_clock = cpu_clock
        self._cpu_since = 0.0
        """CPU time at the beginning of the batch, or after the last mask that seemed slow."""
        self.grammars: dict[int, LLMatcher] = {}
        """Initial matcher by grammar number; the compiling thread adds entries."""
        self._matchers: dict[int, LLMatcher] = {}
        self._grammar_of: dict[int, int] = {}
        self._debts: dict[int, float] = {}
        """Time of slow masks by slot that fast ones have not paid off, in seconds."""
        self._written: list[int] = []
        """Indices of the masks written in the last batch."""
        self._slow: set[int] = set()
        """Numbers of grammars whose masks took too long."""

    def run(self) -> None:
        """Execute batches forever."""
        while True:
            self.do_next()

    def do_next(self) -> None:
        """Wait for a batch and execute it."""
        num_refused = self.do(self.channel.next_batch().tolist())
        # Checked here because the masks are in this core's cache.
        self.channel.finish_batch(num_refused, bool(self._written) and self.masks.may_end(self._written))

    def do(self, operations: Sequence[int]) -> int:
        """Execute a batch and return the number of refused masks.

        The engine is notified before the first mask, so that it processes the tokens meanwhile.
        """
        matchers, channel, clock = self._matchers, self.channel, self.clock
        self._written = written = []
        self._cpu_since = self.cpu_clock()
        since, num_masks, num_flagged = clock(), 0, 0
        give_up = since + BATCH_SECONDS
        for kind, slot, value in zip(operations[0::3], operations[1::3], operations[2::3], strict=True):
            if kind == MASK:
                if not num_masks:
                    channel.add_flagged(num_flagged)
                    channel.finish_accepting()
                    since, num_flagged = clock(), 0
                num_masks += 1
                if since < give_up and self._write_mask(slot, value, since):
                    written.append(value)
                    channel.has_mask[slot] = True
                else:
                    channel.has_mask[slot] = False
                since = clock()
            elif kind in (ACCEPT, EXPECT):
                if kind == EXPECT:
                    value, had_to_wait = self._await_token(value)
                    give_up = clock() + BATCH_SECONDS if had_to_wait else give_up
                if value == NO_TOKEN:
                    continue
                matcher = matchers[slot]
                accepted = matcher.consume_token(value)
                # The state after a forced token is known, and expensive to compute.
                if not accepted or not channel.drop_forced(slot, value):
                    self._write_state(slot, matcher, ACCEPTED if accepted else 0)
                num_flagged += channel.flags[slot] != ACCEPTED
            elif kind == TAKE:
                matchers[slot].consume_token(value)
                channel.flags[slot] = ACCEPTED
            elif kind == OPEN:
                matchers[slot] = self.grammars[value].deep_copy()
                self._grammar_of[slot] = value
                self._debts.pop(slot, None)
                self._write_state(slot, matchers[slot], 0)
            elif kind == CLOSE:
                del matchers[slot], self._grammar_of[slot]
            else:
                del self.grammars[slot]
                self._slow.discard(slot)
        channel.add_flagged(num_flagged)
        return num_masks - len(written)

    def _await_token(self, index: int) -> tuple[int, bool]:
        """Wait for a token that the device writes; return it and whether it was pending at first."""
        token, since = self.masks.token(index), 0.0
        while token == PENDING_TOKEN:
            since = since or time.monotonic()
            is_soon = time.monotonic() < since + AWAKE_SECONDS
            time.sleep(0 if is_soon else NAP_SECONDS)  # lets other threads run
            token = self.masks.token(index)
        return token, since > 0

    def _write_state(self, slot: int, matcher: LLMatcher, flags: int) -> None:
        if matcher.is_stopped():
            # A failed matcher is stopped, too.
            flags |= STOPPED | (FAILED if matcher.is_error() else 0)
        elif forced := matcher.compute_ff_tokens():
            flags |= FORCES
            self.channel.write_forced(slot, forced)
            if len(forced) > MAX_FORCED:
                flags |= FORCES_MORE
            else:
                # A rollback takes a fifth of the time of a copy.
                if matcher.consume_tokens(forced) and matcher.is_stopped():
                    flags |= ENDS_FORCED
                if not matcher.rollback(len(forced)):
                    flags |= FAILED
        self.channel.flags[slot] = flags

    def _write_mask(self, slot: int, index: int, start: float) -> bool:
        """Write a mask unless its grammar is slow; return True if it was written.

        start: current time in seconds.
        """
        if self._slow and self._grammar_of[slot] in self._slow:
            return False
        flags = self.channel.flags[slot]
        if flags & FAILED:
            return False
        if flags & FORCES:
            # The mask allows only the forced token; the matcher would take longer to compute it.
            self.masks.write_one(index, self.channel.next_forced(slot))
            return True
        matcher = self._matchers[slot]
        matcher.unsafe_compute_mask_ptr(self.masks.address(index), self.masks.row_bytes)
        took, debt = self.clock() - start, self._debts.get(slot, 0.0)
        if took > FREE_SECONDS:
            # On a loaded machine most of it may be the time of other processes.
            cpu = self.cpu_clock()
            took, self._cpu_since = min(took, cpu - self._cpu_since), cpu
        if took > FREE_SECONDS or debt:
            self._debts[slot] = debt = debt + took if took > FREE_SECONDS else max(0.0, debt + took - FREE_SECONDS)
        if debt > SLOW_SECONDS:
            self._slow.add(self._grammar_of[slot])
            return False
        return not matcher.is_error()


def compile_requests(connection: Connection, matchers: Matchers, worker: Worker) -> None:
    """Compile grammars for the engine and reply with the error, "" for none.

    Ends the process when the engine is gone.
    """
    try:
        while True:
            number, text = msgspec.msgpack.decode(connection.recv_bytes(), type=tuple[int, str])
            problem = _compile(matchers, worker, number, text)
            connection.send_bytes(problem.encode())
    except (EOFError, OSError):
        os._exit(0)


def _compile(matchers: Matchers, worker: Worker, number: int, text: str) -> str:
    """Compile one grammar; return the error, "" for none."""
    try:
        matcher = matchers.matcher(text)
    except RequestError as error:
        return str(error)
    except BaseException as error:  # a panic of llguidance is not an Exception
        return f"the grammar does not compile: {error}"
    if matcher.is_error():
        return f"the grammar does not compile: {reason(matcher.get_error())}"
    worker.grammars[number] = matcher
    return ""


def main(settings: WorkerSettings) -> None:
    # Ctrl-C in a terminal and SIGTERM from a service manager are for the engine; this process ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_SECONDS)
    channel = Channel(map_memory(settings.memory_fd), settings.wake_fd)
    facts = settings.facts
    worker = Worker(channel, MappedMasks(settings.mask_fds, facts.mask_bytes, facts.end_ids))
    matchers = Matchers(Path(facts.tokenizer_file), facts.vocab_size, facts.end_ids)
    arguments = (Connection(settings.connection_fd), matchers, worker)
    Thread(target=compile_requests, args=arguments, name="compile", daemon=True).start()
    worker.run()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=WorkerSettings))
