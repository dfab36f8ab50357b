"""One short run of the benchmark of tick jitter."""

import json
from pathlib import Path

import pytest

from benchmarks.frontends import tick_jitter
from benchmarks.frontends.tick_jitter import INSIDE, Figures, line
from benchmarks.measuring import results


def test_row_names_the_place_of_the_frontend() -> None:
    assert line(Figures(INSIDE, 4, 90, 1.0, 2.0, 3.0, 4.0, 5.0, 76.0)).split() == [
        "inside", "4", "90", "1.000", "2.000", "3.000", "4.000", "5.000", "76"
    ]  # fmt: skip
    assert line(Figures(2, 4, 90, 1.0, 2.0, 3.0, 4.0, 5.0, 76.0)).split()[:2] == ["2", "outside"]


@pytest.mark.slow
def test_run_times_ticks_with_the_frontend_inside_and_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    tick_jitter.main(["--streams", "2", "--seconds", "2", "--device", "cpu", "--save", "jitter"])
    inside, outside = json.loads((tmp_path / "jitter.json").read_text())["figures"]
    assert (inside["frontends"], outside["frontends"]) == (0, 1)
    assert all(figures["ticks"] > 5 and 0 < figures["p50"] <= figures["p99"] for figures in (inside, outside))
