"""Plots of benchmark results. matplotlib is optional."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.serving.reference import Reference, ReferenceRow
from tandem.frontend.cli.bench.level import Level
from tandem.protocol.installing import install_extra

Panel = tuple[str, list[tuple[str, Callable[[Level], float | None]]], Callable[[ReferenceRow], float]]

_PANELS: tuple[Panel, ...] = (
    ("output tokens/s", [("", lambda level: level.output_tokens_per_s)], lambda row: row.output_tokens_per_s),
    (
        "TTFT ms",
        [("p50", lambda level: level.ttft_ms.get("p50")), ("p99", lambda level: level.ttft_ms.get("p99"))],
        lambda row: row.ttft_p50_ms,
    ),
    ("TPOT ms, mean", [("", lambda level: level.tpot_ms.get("mean"))], lambda row: row.tpot_mean_ms),
    ("ITL ms, p99", [("", lambda level: level.itl_ms.get("p99"))], lambda row: row.itl_p99_ms),
)


class PlottingUnavailableError(Exception):
    """Raised without matplotlib; the message gives the command that installs it."""


def pyplot() -> Any:
    """Return matplotlib's pyplot, drawing to files only.

    Raises PlottingUnavailableError if matplotlib is not installed.
    """
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise PlottingUnavailableError(
            f"--plot needs matplotlib, which is not installed; run {install_extra('bench')}, or leave --plot out"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found, unused-ignore]

    return pyplot


def plot_serving(path: Path, title: str, levels: list[Level], reference: Reference | None = None) -> None:
    """Plot throughput and latency over streams or the arrival rate, the reference with dashed lines."""
    plt = pyplot()
    open_loop = any(level.load.rate is not None for level in levels)
    at = [level.load.rate or level.load.streams for level in levels]
    ticks = set(at)
    if reference is not None and not open_loop:
        ticks |= {row.streams for row in reference.rows}
        title += f"\ndashed: {reference.engine}, {reference.model}, {reference.machine}, "
        title += f"{reference.input_len} in, {reference.output_len} out"
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for axis, (name, series, reference_figure) in zip(axes.flat, _PANELS, strict=True):
        for label, value in series:
            # None breaks the line where a level completed nothing.
            heights = [float("nan") if (height := value(level)) is None else height for level in levels]
            axis.plot(at, heights, marker="o", label=f"measured {label}".strip())
        if reference is not None and not open_loop:
            _draw_reference(axis, reference, reference_figure)
        axis.set_xlabel("requests/s offered" if open_loop else "streams")
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
        axis.set_title(name)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_reference(axis: Any, reference: Reference, figure: Callable[[ReferenceRow], float]) -> None:
    for frontends in reference.frontends():
        rows = [row for row in reference.rows if row.frontends == frontends]
        label = f"{reference.engine}, {frontends} frontend{'s' if frontends > 1 else ''}"
        axis.plot([row.streams for row in rows], [figure(row) for row in rows], "--", marker="s", label=label)
