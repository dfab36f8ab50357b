"""Figure of a decode benchmark, drawn from its JSON.

python -m benchmarks.plot_decode benchmarks/results/decode_1b.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.measuring.plots import pyplot


def series(steps: list[dict[str, Any]], mode: str, name: str) -> tuple[list[int], list[float]]:
    """Return the row counts and one figure of every step measured in this mode."""
    chosen = [step for step in steps if step["mode"] == mode]
    return [step["rows"] for step in chosen], [step[name] for step in chosen]


def plot_decode(path: Path, title: str, steps: list[dict[str, Any]]) -> None:
    """Plot milliseconds per step with their lower bound, and CPU and GPU time.

    Raises PlottingUnavailableError without matplotlib.
    """
    plt = pyplot()
    figure, (times, parts) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for mode in ("pipelined", "blocking"):
        times.plot(*series(steps, mode, "step"), marker="o", label=mode)
    times.plot(*series(steps, "pipelined", "floor"), "--", label="floor: weights and KV read once")
    times.plot(*series(steps, "pipelined", "linears"), ":", label="linear layers alone, cuBLAS")
    times.set_ylabel("ms a step")
    parts.plot(*series(steps, "pipelined", "gpu"), marker="o", label="GPU")
    parts.plot(*series(steps, "pipelined", "cpu"), marker="s", label="CPU, without waiting")
    parts.set_ylabel("ms of a pipelined step")
    for axis in (times, parts):
        rows = series(steps, "pipelined", "step")[0]
        axis.set_xscale("log", base=2)
        axis.set_xticks(rows, [str(count) for count in rows])
        axis.set_xlabel("rows")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON of bench_decode; the figure is written next to it")
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text())
    config, figures = result["config"], result["figures"]
    bandwidth = figures["bandwidth"] / 1e9
    title = f"{config['shape']} on {config['gpu']}, context 320 to 576, read bandwidth {bandwidth:.0f} GB/s"
    path = arguments.result.with_suffix(".png")
    plot_decode(path, title, figures["steps"])
    print(path)


if __name__ == "__main__":
    main()
