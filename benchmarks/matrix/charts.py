"""Bar charts of a matrix: a group per load, a bar per server."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.matrix.figures import Cell, Figures, Held, PrefillGaps
from benchmarks.measuring.plots import pyplot

Panel = tuple[str, Callable[[Figures], float | None]]


def _ttft_of(priority: int) -> Panel:
    return f"TTFT ms of priority {priority}, p50", lambda found: found.ttft_by_priority.get(priority, {}).get("p50")


MATRIX_PANELS: tuple[Panel, ...] = (
    ("output tokens/s", lambda found: found.output_tokens_per_s),
    ("TTFT ms, p50", lambda found: found.ttft.get("p50")),
    ("ITL ms, p99", lambda found: found.itl.get("p99")),
    ("queue wait ms, p95", lambda found: found.queue_wait.get("p95")),
)


def policy_panels(priorities: Sequence[int]) -> tuple[Panel, ...]:
    """Return the panels of all matrices, and those of the lowest and highest priority class."""
    return (*MATRIX_PANELS, *(_ttft_of(priority) for priority in (priorities[0], priorities[-1])))


def _label(height: float) -> str:
    return f"{height:,.0f}" if height >= 100 else f"{height:.3g}"


def _bars(axis: Any, title: str, groups: Sequence[str], series: dict[str, list[float]]) -> None:
    """Draw the bars of a panel.

    series: heights per group, by name.
    """
    width = 0.8 / len(series)
    for index, (name, heights) in enumerate(series.items()):
        drawn = axis.bar([at + index * width for at in range(len(groups))], heights, width, label=name)
        axis.bar_label(drawn, fmt=_label, fontsize=6, rotation=90, padding=2)
    axis.set_xticks([at + 0.4 - width / 2 for at in range(len(groups))], groups)
    axis.margins(y=0.25)
    axis.set_title(title)
    axis.grid(axis="y", alpha=0.3)


def draw_cells(path: Path, title: str, cells: list[Cell], panels: Sequence[Panel]) -> None:
    """Draw the figures of all cells as bars.

    Raises PlottingUnavailableError without matplotlib.
    """
    plt = pyplot()
    servers = list(dict.fromkeys(cell.configuration for cell in cells))
    loads = list(dict.fromkeys(cell.scenario for cell in cells))
    found = {(cell.configuration, cell.scenario): cell.median for cell in cells}
    lines = len(panels) // 2
    figure, axes = plt.subplots(lines, 2, figsize=(12, 3.6 * lines), layout="constrained")
    for axis, (name, value) in zip(axes.flat, panels, strict=True):
        _bars(axis, name, loads, {server: [value(found[server, load]) or 0.0 for load in loads] for server in servers})
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_memory(path: Path, title: str, held: Sequence[Held], prefill_gaps: dict[str, PrefillGaps]) -> None:
    """Draw the concurrent sequences, and the ITL during long prompts.

    Raises PlottingUnavailableError without matplotlib.
    """
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    _bars(
        left,
        "sequences at once, while others wait for memory",
        [one.configuration for one in held],
        {"hold a row": [one.running for one in held], "computed in a step": [one.step_rows for one in held]},
    )
    gaps = list(prefill_gaps.values())
    _bars(
        right,
        "gap between tokens, ms",
        list(prefill_gaps),
        {
            "p50 alone": [one.alone.get("p50", 0.0) for one in gaps],
            "p99 alone": [one.alone.get("p99", 0.0) for one in gaps],
            "p50 during long prompts": [one.loaded.get("p50", 0.0) for one in gaps],
            "p99 during long prompts": [one.loaded.get("p99", 0.0) for one in gaps],
        },
    )
    for axis in (left, right):
        axis.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
