"""Compilation of grammars on background threads, with a cache of the results."""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

from msgspec import Struct

from tandem.engine_core.constraints.compile_lane import NICENESS, CompileLane
from tandem.engine_core.constraints.cpu_times import CpuTimes
from tandem.engine_core.constraints.grammars import CompiledGrammar
from tandem.engine_core.constraints.workers.link import WorkerLink
from tandem.engine_core.constraints.workers.pool import WorkerPool
from tandem.engine_core.constraints.workers.remote_matcher import RemoteGrammar
from tandem.engine_core.contracts import Constraint
from tandem.engine_core.errors import RequestError
from tandem.protocol.errors import ErrorCode
from tandem.protocol.logs import without_message
from tandem.protocol.stats import EngineStats

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_SECONDS = 10.0
"""Longest wait of a request for its grammar, in seconds, including the time for grammars before it. Most compile in
milliseconds."""
CPU_SECONDS = 6.0
"""CPU time from which on a grammar is itself to blame for the wait. Frontends accept grammars of up to half as much."""
QUICK_SECONDS, MIDDLE_SECONDS = 0.03, 0.3
"""CPU time that a frontend measured for a grammar, up to which it goes to the first lane, and to the second. The engine
takes about as long as a frontend."""
CACHED_GRAMMARS = 64
"""Compiled grammars that are kept."""


class Job(Struct):
    """A grammar that is being compiled or waiting for a thread."""

    lane: CompileLane
    waiting: set[int]
    """Ids of the sequences that wait for it."""
    future: Future[object] | None = None
    """Its compilation; None until it has a thread."""
    began: float = 0.0
    """Time at which it got a thread, in seconds of the clock."""


class Waiter(Struct, frozen=True):
    """A sequence's request for a constraint."""

    grammar: str
    ignore_ends: bool
    key: str
    """Name of the API key, "" for none."""
    deadline: float
    """Time at which the request fails, in seconds of the clock."""


class Compiled(Struct, frozen=True):
    """A result on its way from a compile thread to the loop."""

    grammar: str
    result: CompiledGrammar | RequestError
    seconds: float
    """Time that the compilation took, in seconds."""


class Relief(Struct, frozen=True):
    """A result on its way from the thread that waits for workers to the loop."""

    grammar: str
    compiled: CompiledGrammar
    remote: RemoteGrammar | None
    """The grammar on a worker; None if no worker follows it."""
    was_refused: bool
    """True if a worker could not compile it."""


def compile_lanes() -> tuple[CompileLane, ...]:
    """Build the lanes of a compiler, for quick grammars first.

    A grammar that is slower than its frontend measured delays the others of its lane only until it moves to a spare
    thread.
    """
    return (
        CompileLane("quick grammars", 2, QUICK_SECONDS, spare_threads=2, overrun_seconds=0.25),
        CompileLane("slow grammars", 1, MIDDLE_SECONDS, spare_threads=1, overrun_seconds=1.0, niceness=NICENESS),
        CompileLane("very slow grammars", 1, niceness=NICENESS),
    )


class GrammarCompiler:
    """Implement `contracts.Compiler` with a cache.

    The cache is keyed by the grammar's text and drops the least recently used. Grammars go to lanes by the time that
    frontends measured, so that slow ones delay one another and no others.

    `_compile` and `_compile_on_worker` run on other threads and return results through `_compiled`; all else runs on
    the loop's thread. A thread cannot be stopped, so a compilation past its deadline fails its requests but goes on;
    its result is cached for the next request. Workers have a thread of their own, since one that starts or hangs keeps
    it for seconds.
    """

    def __init__(
        self,
        compile_grammar: Callable[[str], CompiledGrammar],
        lanes: Sequence[CompileLane],
        wake: Callable[[], None],
        stats: EngineStats,
        clock: Callable[[], float],
        limit_seconds: float = COMPILE_TIMEOUT_SECONDS,
        cached: int = CACHED_GRAMMARS,
        cpu_times: CpuTimes | None = None,
        workers: WorkerPool | None = None,
    ) -> None:
        """Store the parts of a compiler.

        compile_grammar: may raise RequestError; lanes: by ascending `max_seconds`, the last one infinite; wake:
        called on a compile thread with each result; workers: follow the grammars of many sequences.
        """
        self.compile_grammar = compile_grammar
        self.lanes = lanes
        self.wake = wake
        self.stats = stats
        self.clock = clock
        self.limit_seconds = limit_seconds
        self.cached = cached
        self.workers = workers
        self._grammars: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._cpu_times = cpu_times or CpuTimes()
        self._jobs: dict[str, Job] = {}
        self._waiters: dict[int, Waiter] = {}
        """Open requests by sequence id, the earliest deadline first."""
        self._ready: list[tuple[int, Constraint | RequestError]] = []
        self._compiled: SimpleQueue[Compiled | Relief] = SimpleQueue()
        self._relieving: set[str] = set()
        """Grammars that a worker compiles or is to compile."""
        self._worker_lane = CompileLane("grammars for workers", 1)

    def start(self, seq_id: int, grammar: str, ignore_ends: bool, key: str = "", seconds: float = 0.0) -> None:
        self._take_compiled()
        compiled_grammar = self._grammars.get(grammar)
        if compiled_grammar is not None and compiled_grammar.is_spent:
            del self._grammars[grammar]
        elif compiled_grammar is not None:
            self._grammars.move_to_end(grammar)
            self._ready.append((seq_id, compiled_grammar.constraint(ignore_ends, key)))
            if seconds <= self.lanes[0].max_seconds:
                self._relieve(grammar, compiled_grammar)
            return
        job = self._jobs.get(grammar)
        if job is None:
            lane = next((lane for lane in self.lanes if seconds <= lane.max_seconds), self.lanes[-1])
            job = self._jobs[grammar] = Job(lane, set())
        job.waiting.add(seq_id)
        self._waiters[seq_id] = Waiter(grammar, ignore_ends, key, self.clock() + self.limit_seconds)
        if job.future is None:
            job.lane.add(key, grammar)
            self._begin()

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs or self._relieving)

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
            job.lane.remove(waiter.grammar)
            del self._jobs[waiter.grammar]
        elif job.future.cancel():
            job.lane.end(waiter.grammar)
            del self._jobs[waiter.grammar]

    def take_finished(self) -> list[tuple[int, Constraint | RequestError]]:
        self._take_compiled()
        self._fail_overdue()
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        for lane in (*self.lanes, self._worker_lane):
            lane.close()
        workers, self.workers = self.workers, None
        if workers is not None:
            workers.close()

    def _take_compiled(self) -> None:
        while not self._compiled.empty():
            result = self._compiled.get()
            if isinstance(result, Relief):
                self._on_relief(result)
            else:
                self._on_compiled(result)
        now = self.clock()
        for grammar, job in self._jobs.items():
            if job.future is not None and now - job.began > job.lane.overrun_seconds:
                job.lane.set_aside(grammar)
        self._begin()

    def _begin(self) -> None:
        """Start compilations on free threads."""
        for lane in self.lanes:
            while (grammar := lane.take()) is not None:
                self._jobs[grammar].began = self.clock()
                self._jobs[grammar].future = lane.submit(partial(self._compile, grammar))

    def _on_compiled(self, compiled: Compiled) -> None:
        job = self._jobs.pop(compiled.grammar)
        job.lane.end(compiled.grammar)
        self.stats.compile_time.observe(compiled.seconds)
        result = compiled.result
        if isinstance(result, CompiledGrammar):
            result = self._keep(compiled.grammar, result)
        for seq_id in job.waiting:
            waiter = self._waiters.pop(seq_id)
            if isinstance(result, CompiledGrammar):
                self._ready.append((seq_id, result.constraint(waiter.ignore_ends, waiter.key)))
            else:
                self._ready.append((seq_id, result))
        if isinstance(result, CompiledGrammar) and job.lane is self.lanes[0]:
            self._relieve(compiled.grammar, result)

    def _on_relief(self, relief: Relief) -> None:
        self._relieving.remove(relief.grammar)
        if self.workers is not None:
            self.workers.update_stats()
        if relief.remote is not None:
            relief.compiled.add_remote(relief.remote)
            if self._grammars.get(relief.grammar) is relief.compiled:
                self._relieve(relief.grammar, relief.compiled)
        elif relief.was_refused:
            relief.compiled.keep_here()

    def _keep(self, grammar: str, compiled_grammar: CompiledGrammar) -> CompiledGrammar:
        """Add a grammar to the cache unless it is cached, and return the cached one."""
        kept = self._grammars.setdefault(grammar, compiled_grammar)
        if len(self._grammars) > self.cached:
            self._grammars.popitem(last=False)
        return kept

    def _relieve(self, grammar: str, compiled_grammar: CompiledGrammar) -> None:
        """Have a worker compile a quick grammar too if many sequences are followed.

        No request waits for the result.
        """
        workers = self.workers
        if workers is None:
            return
        workers.give_up_silent()
        if grammar in self._relieving or len(compiled_grammar.links) >= workers.count:
            return
        taken = compiled_grammar.links
        num_followed = sum(each.num_followed for each in self._grammars.values())
        if compiled_grammar.wants_worker(num_followed) and workers.has_free(taken):
            self._relieving.add(grammar)
            self._worker_lane.submit(partial(self._compile_on_worker, workers, grammar, compiled_grammar, taken))

    def _fail_overdue(self) -> None:
        now = self.clock()
        while self._waiters:
            seq_id, waiter = next(iter(self._waiters.items()))
            if waiter.deadline > now:
                return
            error = self._overdue(waiter.grammar)
            self.cancel(seq_id)
            self._ready.append((seq_id, error))

    def _overdue(self, grammar: str) -> RequestError:
        """Return the error for a request that timed out.

        It blames the grammar or the load.
        """
        if self._cpu_times.seconds(grammar) >= CPU_SECONDS:
            message = f"the grammar takes more than {CPU_SECONDS:g} s of CPU time to compile; make it smaller"
            return RequestError(ErrorCode.INVALID_GRAMMAR, message)
        wait = math.ceil(self.limit_seconds)
        message = f"the grammar was not compiled within {wait} s because others were; try again in {wait} s"
        return RequestError(ErrorCode.OVERLOADED, message, wait)

    def _compile(self, grammar: str) -> None:
        self._cpu_times.begin(grammar)
        start = self.clock()
        result: CompiledGrammar | RequestError
        try:
            result = self.compile_grammar(grammar)
        except RequestError as error:
            result = error
        except BaseException as error:  # a panic of llguidance is not an Exception
            logger.error("a grammar of %d characters failed", len(grammar), extra=without_message(error))
            result = RequestError(ErrorCode.INVALID_GRAMMAR, f"the grammar does not compile: {error}")
        self._cpu_times.end(grammar)
        self._compiled.put(Compiled(grammar, result, self.clock() - start))
        self.wake()

    def _compile_on_worker(
        self, workers: WorkerPool, grammar: str, compiled: CompiledGrammar, taken: list[WorkerLink]
    ) -> None:
        """Have a worker compile a grammar that was compiled in this process; `taken` have it already."""
        remote, was_refused = None, False
        try:
            remote = workers.compile(grammar, taken)
        except Exception as error:
            was_refused = True
            message = "a worker could not compile a grammar of %d characters"
            logger.error(message, len(grammar), extra=without_message(error))
        self._compiled.put(Relief(grammar, compiled, remote, was_refused))
        self.wake()
