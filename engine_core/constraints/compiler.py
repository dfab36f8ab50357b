"""Compiles grammars on threads of its own, and keeps what it compiled."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

from msgspec import Struct

from tandem.engine_core.constraints.grammars import CompiledGrammar
from tandem.engine_core.contracts import Constraint
from tandem.engine_core.errors import RequestError
from tandem.protocol.errors import ErrorCode
from tandem.protocol.stats import EngineStats

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 10.0
"""How long a request waits for its grammar, those of others before it included. Most take milliseconds."""
CACHED_GRAMMARS = 64


class Job(Struct):
    """A grammar that is being compiled or waits for a thread."""

    future: Future[None]
    waiting: set[int]
    """The sequences that want it."""


class Waiter(Struct, frozen=True):
    grammar: str
    ignore_ends: bool
    deadline: float


class Compiled(Struct, frozen=True):
    """What a thread hands to the loop."""

    grammar: str
    result: CompiledGrammar | RequestError
    seconds: float


class GrammarCompiler:
    """Implements `contracts.Compiler`: a cache by the grammar's text, the least recently used dropped first.

    Everything but `_compiled` and what `_compile` calls belongs to the loop's thread. A thread cannot be stopped, so a
    grammar past its time is given up, not ended; what comes of it is kept for the next request that asks.
    """

    def __init__(
        self,
        compile_grammar: Callable[[str], CompiledGrammar],
        threads: ThreadPoolExecutor,
        wake: Callable[[], None],
        stats: EngineStats,
        clock: Callable[[], float],
        limit_seconds: float = COMPILE_SECONDS,
        cached: int = CACHED_GRAMMARS,
    ) -> None:
        """compile_grammar: raises RequestError; wake: called on a compile thread when it has news for the loop."""
        self.compile_grammar = compile_grammar
        self.threads = threads
        self.wake = wake
        self.stats = stats
        self.clock = clock
        self.limit_seconds = limit_seconds
        self.cached = cached
        self._grammars: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._jobs: dict[str, Job] = {}
        self._waiters: dict[int, Waiter] = {}
        """By sequence, the earliest deadline first."""
        self._ready: list[tuple[int, Constraint | RequestError]] = []
        self._compiled: SimpleQueue[Compiled] = SimpleQueue()

    def start(self, seq_id: int, grammar: str, ignore_ends: bool) -> None:
        compiled_grammar = self._grammars.get(grammar)
        if compiled_grammar is not None:
            self._grammars.move_to_end(grammar)
            self._ready.append((seq_id, compiled_grammar.constraint(ignore_ends)))
            return
        if grammar not in self._jobs:
            self._jobs[grammar] = Job(self.threads.submit(self._compile, grammar), set())
        self._jobs[grammar].waiting.add(seq_id)
        self._waiters[seq_id] = Waiter(grammar, ignore_ends, self.clock() + self.limit_seconds)

    def forget(self, seq_id: int) -> None:
        self._ready = [ready for ready in self._ready if ready[0] != seq_id]
        waiter = self._waiters.pop(seq_id, None)
        if waiter is None:
            return
        job = self._jobs[waiter.grammar]
        job.waiting.remove(seq_id)
        if not job.waiting and job.future.cancel():
            del self._jobs[waiter.grammar]

    def finished(self) -> list[tuple[int, Constraint | RequestError]]:
        while not self._compiled.empty():
            self._take(self._compiled.get())
        self._give_up()
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _take(self, compiled: Compiled) -> None:
        self.stats.compile_time.observe(compiled.seconds)
        result = compiled.result
        if isinstance(result, CompiledGrammar):
            self._grammars[compiled.grammar] = result
            if len(self._grammars) > self.cached:
                self._grammars.popitem(last=False)
        for seq_id in self._jobs.pop(compiled.grammar).waiting:
            waiter = self._waiters.pop(seq_id)
            answer = result.constraint(waiter.ignore_ends) if isinstance(result, CompiledGrammar) else result
            self._ready.append((seq_id, answer))

    def _give_up(self) -> None:
        now = self.clock()
        while self._waiters:
            seq_id, waiter = next(iter(self._waiters.items()))
            if waiter.deadline > now:
                return
            self.forget(seq_id)
            message = f"the grammar was not compiled within {self.limit_seconds:g} s; simplify it, or retry later"
            self._ready.append((seq_id, RequestError(ErrorCode.INVALID_GRAMMAR, message)))

    def _compile(self, grammar: str) -> None:
        start = self.clock()
        result: CompiledGrammar | RequestError
        try:
            result = self.compile_grammar(grammar)
        except RequestError as error:
            result = error
        except BaseException as error:  # a panic of llguidance is no Exception
            logger.exception("a grammar of %d characters", len(grammar))
            result = RequestError(ErrorCode.INVALID_GRAMMAR, f"the grammar does not compile: {error}")
        self._compiled.put(Compiled(grammar, result, self.clock() - start))
        self.wake()
