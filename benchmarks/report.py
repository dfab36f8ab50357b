"""Write a Markdown report with charts on the results of `run_matrix`.

    python -m benchmarks.report benchmarks/results/NAME.json          # needs the extra `bench`

Written next to the file: NAME.md, NAME_matrix.png, NAME_policies.png, NAME_memory.png.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.matrix.charts import MATRIX_PANELS, draw_cells, draw_memory, policy_panels
from benchmarks.matrix.figures import Measured
from benchmarks.matrix.tables import cell_tables, count, held_table, prefill_table, rows_bind, servers, spread
from benchmarks.measuring.plots import PlottingUnavailableError, pyplot
from benchmarks.serving.table import number
from tandem.protocol.installing import install_extra


class Saved(Struct):
    """Results file, as `benchmarks.measuring.results.save` writes it."""

    origin: dict[str, Any]
    config: dict[str, Any]
    figures: Measured


def ratios(measured: Measured) -> Iterator[str]:
    """Yield sentences that compare two configurations."""
    cells = {(cell.configuration, cell.scenario): cell for cell in measured.matrix}
    warm = cells.get(("prefix", "W3 warm"))
    for server, load in (("prefix", "W3 cold"), ("chunked", "W3 warm")):
        other = cells.get((server, load))
        if warm is not None and other is not None:
            times = [a.ttft["p50"] / b.ttft["p50"] for a, b in zip(other.trials, warm.trials, strict=True)]
            yield (
                f"TTFT p50 of {load} on {server}, {number(other.median.ttft['p50'])} ms, is {spread(times)} times that "
                f"of W3 warm on prefix, {number(warm.median.ttft['p50'])} ms"
            )
    for base, held in ((measured.held[0], other) for other in measured.held[1:]):
        if base.running:
            yield (
                f"sequences of W2's lengths at once in {base.kv_tokens:,} KV tokens: {number(base.running)} on "
                f"{base.configuration} (contiguous regions), {number(held.running)} on {held.configuration} (pages), "
                f"{held.running / base.running:.1f} times as many; preempted {count(held.preemptions)} times"
                + (f"; the limit of {held.rows} rows bounds it" if rows_bind(held) else "")
            )
    for name, gaps in measured.prefill_gaps.items():
        if gaps.gaps:
            yield (
                f"gaps of running streams while a long prompt is computed in {name}: p99 "
                f"{number(gaps.loaded.get('p99'))} ms of {gaps.gaps:,} gaps; {spread(gaps.over['p50'])} times the p50 "
                f"and {spread(gaps.over['p99'])} times the p99 of the same streams alone"
            )


def _origin(saved: Saved) -> Iterator[str]:
    origin, config = saved.origin, saved.config
    yield from (f"- {name}: {value}" for name, value in {**origin.get("machine", {}), **saved.figures.hardware}.items())
    versions = ", ".join(f"{name} {version}" for name, version in origin.get("versions", {}).items())
    yield f"- git {origin.get('git')}, Python {origin.get('python')}, {versions}"
    values = {name: " ".join(value) if isinstance(value, list) else value for name, value in config.items()}
    yield "- run with " + ", ".join(f"{name} {value}" for name, value in values.items())


def _reading(saved: Saved) -> Iterator[str]:
    """Yield remarks for interpreting the columns."""
    if saved.figures.hardware.get("device") == "cpu":
        yield (
            "Measured on a few cores of a processor that other work shares, with a small model and short lengths: only "
            "what servers are to one another counts, no time as such. How far the trials lie apart shows how steady "
            "the machine was."
        )
    yield (
        f"Figures are medians of {saved.config.get('trials')} trials; in brackets their least and most. Times are in "
        "milliseconds. All servers of a section are up at once and take turns load by load, one under load at a time, "
        "so that a slow moment of the machine befalls all of them. Factors are medians of those of each trial."
    )
    yield "Three figures with slashes are p50 / p95 / p99. Of tokens/s the p99 is that of the fastest requests."
    yield (
        "Queue wait: from arrival in the engine to a row. The mean is exact. The percentiles are interpolated within "
        "buckets of the engine's histogram, whose bounds grow by up to two times: no more exact than that."
    )
    yield f"Starved: requests that waited over {saved.config.get('starved_ms')} ms for a token after their first."
    yield "Clients run on the same machine, and speak HTTP: what is measured is what a client sees."


MATRIX = (
    "Each server differs from the one above it by one switch; rows, KV tokens and positions a step are the same for "
    "all."
)
POLICIES = (
    "Half as many rows as streams, and steps that do not hold all prompts. Under every policy requests have priority "
    "0, 1 and 2 in turn, higher being more urgent; only `priority` heeds it."
)
DURING_PREFILL = (
    "Long prompts run one at a time. A gap counts as during prefill if it overlaps the time from a prompt's start to "
    "its first token."
)
HELD = (
    "More streams than memory has room for, and as many rows as streams. Means are over the time in which somebody "
    "waited: of sequences that hold a row, and of rows that steps computed."
)


def markdown(saved: Saved, charts: dict[str, str]) -> str:
    """Format the report as Markdown.

    charts: file names by part.
    """
    measured = saved.figures
    lines = ["# Ways of batching and of keeping KV", "", *_origin(saved), ""]
    lines += [f"{said}\n" for said in _reading(saved)]
    lines += ["## In short", "", *(f"- {line}" for line in ratios(measured))]
    for part, says, cells in (("matrix", MATRIX, measured.matrix), ("policies", POLICIES, measured.policies)):
        if cells:
            lines += ["", f"## {part.capitalize()}", "", says, *_picture(part, charts)]
            lines += cell_tables(cells, measured.scenarios)
    if measured.held or measured.prefill_gaps:
        lines += ["", "## Memory and long prompts", *_picture("memory", charts)]
    if measured.held:
        lines += ["", f"**Sequences at once.** {HELD}", "", *held_table(measured.held)]
    if measured.prefill_gaps:
        lines += ["", f"**Streams during long prompts.** {DURING_PREFILL}", "", *prefill_table(measured.prefill_gaps)]
    if measured.servers:
        lines += ["", "## Servers", "", *servers(measured.servers, measured.common_flags)]
    return "\n".join(lines) + "\n"


def _picture(part: str, charts: dict[str, str]) -> list[str]:
    return ["", f"![{part}]({charts[part]})"] if part in charts else []


def draw_all(path: Path, measured: Measured) -> dict[str, str]:
    """Draw the charts of a results file; return their names by part.

    Raises PlottingUnavailableError without matplotlib.
    """
    pyplot()
    charts = {part: path.with_name(f"{path.stem}_{part}.png") for part in ("matrix", "policies", "memory")}
    where = measured.hardware.get("gpu", "CPU").partition(",")[0]
    drawn = []
    if measured.matrix:
        draw_cells(charts["matrix"], f"ways of batching and of keeping KV, {where}", measured.matrix, MATRIX_PANELS)
        drawn.append("matrix")
    if measured.policies:
        classes = list(measured.policies[0].median.ttft_by_priority) or [0]
        draw_cells(charts["policies"], f"policies, {where}", measured.policies, policy_panels(classes))
        drawn.append("policies")
    if measured.held and measured.prefill_gaps:
        draw_memory(charts["memory"], f"memory and long prompts, {where}", measured.held, measured.prefill_gaps)
        drawn.append("memory")
    return {part: charts[part].name for part in drawn}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    path: Path = parser.parse_args(argv).file
    saved = msgspec.json.decode(path.read_bytes(), type=Saved)
    try:
        charts = draw_all(path, saved.figures)
    except PlottingUnavailableError:
        sys.exit(f"report: charts need matplotlib, which is not installed; run {install_extra('bench')}")
    report = path.with_suffix(".md")
    report.write_text(markdown(saved, charts))
    print(report)


if __name__ == "__main__":
    main()
