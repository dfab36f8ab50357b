"""Figures that the decode benchmark computes from its measurements."""

import pytest

from benchmarks.bench_decode import Bounds, figures_of
from benchmarks.plot_decode import series
from tandem.engine_core.stats import STAGES

BOUNDS = Bounds(floor=0.5, linears=0.8, accepted=1.1)
SECONDS = {f"stage {name}": 0.0001 for name in STAGES} | {"step": 0.002, "gpu": 0.0018, "idle": 0.0002, "alone": 0.0015}


def test_figures_are_computed_from_measured_times() -> None:
    found = figures_of(8, "pipelined", SECONDS, BOUNDS, blocking=2.5)
    assert found.step == pytest.approx(2.0)
    assert found.tokens_per_second == pytest.approx(4000)
    assert found.gpu_idle_percent == pytest.approx(25)
    assert found.gap_percent == pytest.approx(10)
    assert found.over_slower == pytest.approx(2.0 / 1.5)
    assert found.cpu == pytest.approx(0.1 * (len(STAGES) - 1)), "waiting for the device is no work"
    assert found.gain == pytest.approx(0.25)
    assert found.gain_ideal == pytest.approx((0.6 + 1.5) / 1.5 - 1)
    assert figures_of(8, "blocking", SECONDS, BOUNDS, blocking=None).gain is None


def test_plot_series_contains_one_mode() -> None:
    steps = [{"rows": rows, "mode": mode, "step": rows * 1.5} for rows in (1, 8) for mode in ("blocking", "pipelined")]
    assert series(steps, "pipelined", "step") == ([1, 8], [1.5, 12.0])
