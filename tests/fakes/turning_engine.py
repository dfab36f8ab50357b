"""An engine of which nothing is real but its counters: requests end and grammars are compiled at given ticks."""

from collections.abc import Collection

from tandem.engine_core.stats import new_stats


class TurningEngine:
    """Ends a request every few ticks, so that each of as many rows lasts `ticks`, and compiles in some of them.

    In the tick before a compilation ends, its compiler is busy.
    """

    def __init__(self, rows: int, ticks: int, compiled_at: Collection[int]) -> None:
        self.stats = new_stats()
        self.compiler = self
        self.num_ticks = 0
        self.ended_since_compilation = 0
        self._rows, self._ticks_each, self._compiled_at = rows, ticks // rows, compiled_at

    @property
    def is_busy(self) -> bool:
        return self.num_ticks + 1 in self._compiled_at

    def tick(self) -> bool:
        self.num_ticks += 1
        self.stats.running = min(self._rows, self.stats.running + 1)
        if self.num_ticks in self._compiled_at:
            self.stats.compile_time.observe(0.001)
            self.ended_since_compilation = 0
        if self.num_ticks % self._ticks_each == 0:
            self.stats.requests_finished["length"] += 1
            self.ended_since_compilation += 1
        return True
