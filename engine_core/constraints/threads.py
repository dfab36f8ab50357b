"""Threads for work on the rows of a step, as far as their bases allow it at once."""

from collections import Counter
from collections.abc import Iterable, Mapping

from llguidance import LLExecutor

from tandem.engine_core.constraints.grammars import GrammarConstraint

PARALLEL_BASES, PARALLEL_ROWS = 8, 16
"""Other threads may be used for rows of as many bases, or where as many rows are of other bases than the most common.
Fewer are done before the threads have woken up."""


def fitting(executors: Mapping[int, LLExecutor], constraints: Iterable[GrammarConstraint]) -> LLExecutor | None:
    """Return as many threads as these constraints have bases, or the next fewer.

    More would wait for each other's locks. None if one thread is enough.

    executors: threads by their number, the fewest first.
    """
    if not executors:
        return None
    rows = Counter([id(constraint.base) for constraint in constraints])
    if len(rows) < PARALLEL_BASES and rows.total() - max(rows.values(), default=0) < PARALLEL_ROWS:
        return None
    found = [executor for threads, executor in executors.items() if threads <= len(rows)]
    return found[-1] if found else None
