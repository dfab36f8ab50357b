"""Markdown tables of the results, line by line, with times in milliseconds."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.matrix.figures import PERCENTS, Cell, Held, Percentiles, PrefillGaps, ServerFacts
from benchmarks.serving.table import number

CELLS = (
    "server",
    "tokens/s",
    "tokens/s of a request",
    "TTFT",
    "ITL",
    "TPOT",
    "queue wait mean",
    "queue wait",
    "starved",
    "longest gap",
)
HELD = (
    "server",
    "sequences at once, mean",
    "rows of a step, mean",
    "peak",
    "row limit",
    "preemptions",
    "tokens/s",
    "observed s",
)
DURING_PREFILL = (
    "server",
    "long prompts",
    "their TTFT p50",
    "gap alone p50 / p95 / p99",
    "gaps during prefill",
    "gap p50 / p95 / p99",
    "longest",
    "p99 over p50 alone",
    "p99 over p99 alone",
)
ROWS_BIND = 0.9
"""Share of the row limit above which a mean is not limited by memory alone."""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    heads = list(head)
    yield _row(heads)
    yield _row(["---"] * len(heads))
    yield from map(_row, rows)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def count(value: float) -> str:
    """Format a count, possibly fractional as the median of two trials."""
    return f"{value:g}"


def percentiles(sample: Percentiles) -> str:
    return " / ".join(number(sample.get(percent)) for percent in PERCENTS)


def spread(values: Sequence[float]) -> str:
    """Format median, minimum and maximum of trials."""
    if not values:
        return "-"
    return f"{number(statistics.median(values))} ({number(min(values))} to {number(max(values))})"


def cell_tables(cells: list[Cell], scenarios: dict[str, str]) -> Iterator[str]:
    """Yield a table per load, and for loads with priorities one with the queueing time per class."""
    for name in dict.fromkeys(cell.scenario for cell in cells):
        ours = [cell for cell in cells if cell.scenario == name]
        yield from ("", f"**{name}**: {scenarios[name]}", "")
        yield from table(CELLS, map(_cell, ours))
        if classes := list(ours[0].median.ttft_by_priority):
            yield ""
            yield from table(
                ("server", *(f"TTFT of priority {priority}" for priority in classes)),
                (
                    (cell.configuration, *(percentiles(cell.median.ttft_by_priority[priority]) for priority in classes))
                    for cell in ours
                ),
            )


def _cell(cell: Cell) -> tuple[str, ...]:
    found = cell.median
    return (
        cell.configuration,
        spread([trial.output_tokens_per_s for trial in cell.trials]),
        *map(percentiles, (found.request_tokens_per_s, found.ttft, found.itl, found.tpot)),
        number(found.queue_wait.get("mean")),
        percentiles(found.queue_wait),
        count(found.starved),
        number(found.longest_gap),
    )


def held_table(held: list[Held]) -> Iterator[str]:
    yield from table(
        HELD,
        (
            (
                one.configuration,
                f"{number(one.running)}{' (at the row limit)' if rows_bind(one) else ''}",
                number(one.step_rows),
                count(one.peak),
                count(one.rows),
                count(one.preemptions),
                number(one.output_tokens_per_s),
                number(one.seconds),
            )
            for one in held
        ),
    )


def rows_bind(held: Held) -> bool:
    return held.running > ROWS_BIND * held.rows


def prefill_table(prefill_gaps: dict[str, PrefillGaps]) -> Iterator[str]:
    yield from table(DURING_PREFILL, (_prefill_row(name, gaps) for name, gaps in prefill_gaps.items()))


def _prefill_row(name: str, found: PrefillGaps) -> tuple[str, ...]:
    alone, loaded = found.alone, found.loaded
    return (
        name,
        number(found.prompts),
        number(found.prompt_ttft.get("p50")),
        percentiles(alone),
        number(found.gaps),
        percentiles(loaded),
        number(loaded.get("max")),
        *map(spread, found.over.values()),
    )


def servers(found: dict[str, ServerFacts], common_flags: str) -> Iterator[str]:
    """Describe each server by its flags, then list all flags and settings.

    The list has the shared ones and the differences.
    """
    yield f"All of them with `{common_flags}`."
    yield ""
    yield from table(
        ("server", "what it is", "ready s", "its flags"),
        ((name, one.says, number(one.ready_seconds), f"`{one.flags}`") for name, one in found.items()),
    )
    flags = _shared([one.all_flags for one in found.values()])
    settings = _shared([one.settings for one in found.values()])
    yield ""
    yield f"Flags alike for all, defaults included (None: not set, or left to the engine): {_listed(flags)}."
    yield ""
    yield f"What every engine decided alike: {_listed(settings)}; and each for itself:"
    yield ""
    yield from table(
        ("server", "decided"),
        (
            (name, _listed({key: value for key, value in one.settings.items() if key not in settings}))
            for name, one in found.items()
        ),
    )


def _shared(settings: list[dict[str, Any]]) -> dict[str, Any]:
    first, *others = settings or [{}]
    return {key: value for key, value in first.items() if all(key in o and o[key] == value for o in others)}


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"`{name}` {value}" for name, value in settings.items()) or "-"
