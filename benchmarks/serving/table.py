"""Text tables of a run: a line per figure, a column per level."""

from collections.abc import Callable, Iterator

from benchmarks.serving.reference import Reference, ReferenceRow
from tandem.frontend.cli.bench.level import Level

COLUMN, NAME = 14, 30
CPU_WARNING = 85.0
"""CPU percentage above which a client process is likely the bottleneck."""

Figure = Callable[[Level], float]


def number(value: float | None) -> str:
    """Format a number.

    Counts are shown in full, measurements with three or four digits, None as a dash.
    """
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def _line(name: str, cells: list[str]) -> str:
    return f"{name:>{NAME}}" + "".join(f"{cell:>{COLUMN}}" for cell in cells)


_THROUGHPUT: tuple[tuple[str, Figure], ...] = (
    ("completed", lambda level: level.completed),
    ("errors", lambda level: sum(level.errors.values())),
    ("seconds", lambda level: level.seconds),
    ("output tokens/s", lambda level: level.output_tokens_per_s),
    ("total tokens/s", lambda level: level.total_tokens_per_s),
    ("requests/s", lambda level: level.requests_per_s),
    ("concurrency", lambda level: level.concurrency),
)
_LATENCY: tuple[tuple[str, Callable[[Level], dict[str, float]], tuple[str, ...]], ...] = (
    ("TTFT ms", lambda level: level.ttft_ms, ("p50", "p95", "p99")),
    ("TPOT ms", lambda level: level.tpot_ms, ("mean", "p50", "p95", "p99")),
    ("ITL ms", lambda level: level.itl_ms, ("p50", "p95", "p99")),
    ("end to end ms", lambda level: level.e2e_ms, ("mean", "p50", "p99")),
)
_GOODPUT: tuple[tuple[str, Figure], ...] = (
    ("good %", lambda level: 100 * level.goodput.share),
    ("good requests/s", lambda level: level.goodput.requests_per_s),
    ("busiest client, CPU %", lambda level: max(level.client_cpu_percent, default=0.0)),
)
_REFERENCE: tuple[tuple[str, Callable[[ReferenceRow], float]], ...] = (
    ("output tokens/s", lambda row: row.output_tokens_per_s),
    ("TTFT ms p50", lambda row: row.ttft_p50_ms),
    ("TPOT ms mean", lambda row: row.tpot_mean_ms),
    ("ITL ms p99", lambda row: row.itl_p99_ms),
)


def table(levels: list[Level]) -> str:
    """Format the figures of each level."""
    lines = [_line("", [level.load.label for level in levels])]
    lines += [_line(name, [number(figure(level)) for level in levels]) for name, figure in _THROUGHPUT]
    for name, sample, keys in _LATENCY:
        lines += [_line(f"{name} {key}", [number(sample(level).get(key)) for level in levels]) for key in keys]
    if any(level.load.rate is not None for level in levels):
        lines.append(_line("client late ms p99", [number(level.lag_ms.get("p99")) for level in levels]))
    lines += [_line(name, [number(figure(level)) for level in levels]) for name, figure in _GOODPUT]
    return "\n".join(lines)


def reference_table(levels: list[Level], reference: Reference) -> str:
    """Format the reference's figures in the columns of the levels."""
    lines = [f"{reference.engine}, {reference.model}, {reference.machine}", reference.note]
    for frontends in reference.frontends():
        rows = [reference.row(level.load.streams, frontends) for level in levels]
        if not any(rows):
            continue
        lines.append(f"{frontends} frontend{'s' if frontends > 1 else ''}:")
        lines += [_line(name, [number(figure(row)) if row else "-" for row in rows]) for name, figure in _REFERENCE]
    return "\n".join(lines)


def remarks(levels: list[Level]) -> Iterator[str]:
    """Yield remarks for interpreting the columns."""
    for level in levels:
        label = level.load.label
        if level.errors:
            yield f"{label}: errors {level.errors}, the first: {level.error_example}"
        if level.other_length:
            yield f"{label}: {level.other_length} replies had not the length asked for"
        if level.counted_by.keys() - {"usage"}:
            yield f"{label}: tokens counted by {level.counted_by}; only usage is exact"
        if max(level.client_cpu_percent, default=0.0) >= CPU_WARNING:
            yield f"{label}: a client process was at its limit; raise --clients, or read this column as a lower bound"
