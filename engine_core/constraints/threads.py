"""Threads for work on the rows of a step, as far as their bases allow it at once."""

from collections.abc import Collection, Mapping, Sequence

from llguidance import LLExecutor

from tandem.engine_core.constraints.grammars import GrammarConstraint

PARALLEL_BASES, PARALLEL_ROWS = 8, 16
"""Other threads may be used for rows of as many bases, or where as many rows are of other bases than the most common.
Fewer are done before the threads have woken up."""

Group = list[tuple[GrammarConstraint, int]]
"""Constraints of one base, each with a number."""


def by_base(pairs: Sequence[tuple[GrammarConstraint, int]]) -> Collection[Group]:
    """Group constraints by their base.

    Each thread takes a part of the groups' concatenation: with a base in one part alone, none waits for another's lock.
    """
    groups: dict[int, Group] = {}
    for pair in pairs:
        key = id(pair[0].base)
        if key in groups:
            groups[key].append(pair)
        else:
            groups[key] = [pair]
    return groups.values()


def fitting(executors: Mapping[int, LLExecutor], groups: Collection[Group]) -> LLExecutor | None:
    """Return as many threads as there are bases, or the next fewer.

    More would wait for each other's locks. None if one thread is enough.

    executors: threads by their number, the fewest first.
    """
    sizes = [len(group) for group in groups]
    if len(sizes) < PARALLEL_BASES and sum(sizes) - max(sizes, default=0) < PARALLEL_ROWS:
        return None
    found = [executor for threads, executor in executors.items() if threads <= len(sizes)]
    return found[-1] if found else None
