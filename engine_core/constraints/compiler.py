"""Compilation of grammars on background threads, with a cache of the results."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

from msgspec import Struct

from tandem.engine_core.constraints.compile_turns import CompileTurns
from tandem.engine_core.constraints.grammars import CompiledGrammar
from tandem.engine_core.contracts import Constraint
from tandem.engine_core.errors import RequestError
from tandem.protocol.errors import ErrorCode
from tandem.protocol.logs import without_message
from tandem.protocol.stats import EngineStats

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_SECONDS = 10.0
"""Longest wait of a request for its grammar, in seconds, including the time for grammars before it. Most compile in
milliseconds."""
COMPILE_THREADS = 2
"""Number of grammars compiled at once."""
CACHED_GRAMMARS = 64
"""Compiled grammars that are kept."""


class Job(Struct):
    """A grammar that is being compiled or waiting for a thread."""

    waiting: set[int]
    """Ids of the sequences that wait for it."""
    future: Future[None] | None = None
    """Its compilation; None until it has a thread."""


class Waiter(Struct, frozen=True):
    """A sequence's request for a constraint."""

    grammar: str
    ignore_ends: bool
    deadline: float
    """Time at which the request fails, in seconds of the clock."""


class Compiled(Struct, frozen=True):
    """A result on its way from a compile thread to the loop."""

    grammar: str
    result: CompiledGrammar | RequestError
    seconds: float
    """Time that the compilation took, in seconds."""


class GrammarCompiler:
    """Implement `contracts.Compiler` with a cache.

    The cache is keyed by the grammar's text and drops the least recently used.

    Everything but `_compiled` and what `_compile` calls belongs to the loop's thread. A thread cannot be stopped, so a
    compilation past its deadline fails its requests but goes on; its result is cached for the next request.
    """

    def __init__(
        self,
        compile_grammar: Callable[[str], CompiledGrammar],
        threads: ThreadPoolExecutor,
        wake: Callable[[], None],
        stats: EngineStats,
        clock: Callable[[], float],
        limit_seconds: float = COMPILE_TIMEOUT_SECONDS,
        cached: int = CACHED_GRAMMARS,
        num_threads: int = COMPILE_THREADS,
    ) -> None:
        """Keep the parts of a compiler.

        compile_grammar: may raise RequestError; wake: called on a compile thread with each result; num_threads: number
        of `threads`.
        """
        self.compile_grammar = compile_grammar
        self.threads = threads
        self.wake = wake
        self.stats = stats
        self.clock = clock
        self.limit_seconds = limit_seconds
        self.cached = cached
        self._grammars: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._turns = CompileTurns(num_threads)
        self._jobs: dict[str, Job] = {}
        self._waiters: dict[int, Waiter] = {}
        """Open requests by sequence id, the earliest deadline first."""
        self._ready: list[tuple[int, Constraint | RequestError]] = []
        self._compiled: SimpleQueue[Compiled] = SimpleQueue()

    def start(self, seq_id: int, grammar: str, ignore_ends: bool, key: str = "") -> None:
        self._take_compiled()
        compiled_grammar = self._grammars.get(grammar)
        if compiled_grammar is not None:
            self._grammars.move_to_end(grammar)
            self._ready.append((seq_id, compiled_grammar.constraint(ignore_ends)))
            return
        job = self._jobs.setdefault(grammar, Job(set()))
        job.waiting.add(seq_id)
        self._waiters[seq_id] = Waiter(grammar, ignore_ends, self.clock() + self.limit_seconds)
        if job.future is None:
            self._turns.add(key, grammar)
            self._begin()

    def cancel(self, seq_id: int) -> None:
        self._ready = [ready for ready in self._ready if ready[0] != seq_id]
        waiter = self._waiters.pop(seq_id, None)
        if waiter is None:
            return
        job = self._jobs[waiter.grammar]
        job.waiting.remove(seq_id)
        if job.waiting:
            return
        if job.future is None:
            self._turns.remove(waiter.grammar)
            del self._jobs[waiter.grammar]
        elif job.future.cancel():
            self._turns.end(waiter.grammar)
            del self._jobs[waiter.grammar]

    def take_finished(self) -> list[tuple[int, Constraint | RequestError]]:
        self._take_compiled()
        self._fail_overdue()
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        self._turns.close()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _take_compiled(self) -> None:
        while not self._compiled.empty():
            self._on_compiled(self._compiled.get())
        self._begin()

    def _begin(self) -> None:
        """Give free threads to the grammars whose turn it is."""
        while (grammar := self._turns.take()) is not None:
            self._jobs[grammar].future = self.threads.submit(self._compile, grammar)

    def _on_compiled(self, compiled: Compiled) -> None:
        self._turns.end(compiled.grammar)
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

    def _fail_overdue(self) -> None:
        now = self.clock()
        while self._waiters:
            seq_id, waiter = next(iter(self._waiters.items()))
            if waiter.deadline > now:
                return
            self.cancel(seq_id)
            message = f"the grammar was not compiled within {self.limit_seconds:g} s; simplify it, or retry later"
            self._ready.append((seq_id, RequestError(ErrorCode.INVALID_GRAMMAR, message)))

    def _compile(self, grammar: str) -> None:
        start = self.clock()
        result: CompiledGrammar | RequestError
        try:
            result = self.compile_grammar(grammar)
        except RequestError as error:
            result = error
        except BaseException as error:  # a panic of llguidance is not an Exception
            logger.error("a grammar of %d characters failed", len(grammar), extra=without_message(error))
            result = RequestError(ErrorCode.INVALID_GRAMMAR, f"the grammar does not compile: {error}")
        self._compiled.put(Compiled(grammar, result, self.clock() - start))
        self.wake()
