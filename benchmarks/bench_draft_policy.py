"""Adaptive numbers of drafts in a simulation: tokens per millisecond over those of the best fixed number, and of none.

    python -m benchmarks.bench_draft_policy [--steps 4000] [--pass-ms 0.9]

Steps take as long as those of an 8B model on an H200, about; a draft is accepted with the same probability everywhere.
Nothing runs on a device.
"""

import argparse

from tests.support.draft_simulation import ROWS, Simulation, best_fixed, policy_of

SEEDS = {1: 4, 8: 2}
"""Number of runs by rows, of which the mean is printed; 1 for others."""


def ratios(rows: int, probability: float, steps: int, pass_ms: float) -> tuple[float, float, int]:
    """Return the rate over those of the best fixed number and of plain steps, and that number."""
    count, total, policy = SEEDS.get(rows, 1), 0.0, policy_of(pass_ms)
    for seed in range(count):
        simulation = Simulation(policy_of(pass_ms), rows, probability, seed)
        simulation.run(100)
        total += simulation.run(max(400, steps // max(1, rows // 8)))
    best, rate = best_fixed(policy, rows, probability)
    return total / count / rate, total / count * policy.costs.milliseconds(rows, 0, 400) / rows, best


def main() -> None:
    """Print a table of acceptances and rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=4000, help="steps of a run with up to 8 rows")
    parser.add_argument("--pass-ms", type=float, default=0.9, help="milliseconds of a pass of the draft model")
    given = parser.parse_args()
    print("rate over that of the best fixed number, over that of plain steps (the best fixed number)")
    print("acceptance", *[f"{rows:>18} rows" for rows in ROWS])
    for tenths in range(11):
        cells = [ratios(rows, tenths / 10, given.steps, given.pass_ms) for rows in ROWS]
        print(f"{tenths / 10:10.1f}", *[f"{fixed:13.3f} {plain:5.2f} ({best})" for fixed, plain, best in cells])


if __name__ == "__main__":
    main()
