"""A compiler of grammars for tests, with a clock and a gate of their own."""

import threading
from typing import Any

from tandem.engine_core.constraints.compile_lane import CompileLane
from tandem.engine_core.constraints.compiler import GrammarCompiler
from tandem.engine_core.constraints.cpu_times import CpuTimes
from tandem.engine_core.constraints.grammars import CompiledGrammar
from tandem.engine_core.errors import RequestError
from tandem.engine_core.stats import new_stats
from tandem.protocol.errors import ErrorCode
from tests.fakes.clock import FakeClock

WAIT = 30.0


class FakeCpuTimes(CpuTimes):
    """CPU times that a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[str, float] = {}

    def seconds(self, grammar: str) -> float:
        return self.taken.get(grammar, 0.0)


class Workshop:
    """A compiler whose grammars are texts; one that begins with "slow" waits for the gate."""

    def __init__(self, compiled_grammar: CompiledGrammar, *lanes: CompileLane, **sizes: Any) -> None:
        self.compiled_grammar = compiled_grammar
        self.compiled: list[str] = []
        self.gate = threading.Event()
        self.news = threading.Semaphore(0)
        self.clock = FakeClock()
        self.cpu_times = FakeCpuTimes()
        self.compiler = GrammarCompiler(
            self.compile, lanes or (CompileLane("all", 2),), self.news.release, new_stats(), self.clock,
            limit_seconds=10.0, cpu_times=self.cpu_times, **sizes,
        )  # fmt: skip

    def compile(self, grammar: str) -> CompiledGrammar:
        self.compiled.append(grammar)
        if grammar.startswith("slow"):
            assert self.gate.wait(WAIT)
        if grammar == "bad":
            raise RequestError(ErrorCode.INVALID_GRAMMAR, "it is bad")
        if grammar == "bug":
            raise KeyboardInterrupt("a panic")
        return self.compiled_grammar

    def start(self, seq_id: int, grammar: str, key: str = "", seconds: float = 0.0) -> None:
        self.compiler.start(seq_id, grammar, seq_id % 2 == 1, key, seconds)

    def after_news(self) -> dict[int, Any]:
        assert self.news.acquire(timeout=WAIT), "the loop was never woken"
        return dict(self.compiler.take_finished())

    def until_ready(self, number: int) -> list[int]:
        """Return the ids of this many sequences in the order of their results."""
        ready: list[int] = []
        while len(ready) < number:
            ready += self.after_news()
        return ready
