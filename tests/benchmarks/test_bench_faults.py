"""One short run of the benchmark of faults."""

import json
from pathlib import Path

import pytest

from benchmarks import bench_faults
from benchmarks.bench_faults import rate_of, text
from benchmarks.frontends.drill import Outcome
from benchmarks.measuring import results
from tests.support.refusals import numbers_in


def test_many_streams_are_slower_each_unless_asked() -> None:
    assert [rate_of(100, None), rate_of(2000, None), rate_of(2000, 7.0)] == [20.0, 5.0, 7.0]


def test_outcome_is_shown_with_its_goal_and_what_leaked() -> None:
    shown = text(Outcome("a fault", 100, "1 s", {"told": 0.1234}, {"cut": 3}, 2, 5))
    head, *figures = shown.splitlines()
    assert head.startswith("a fault, ") and numbers_in(head) == [100, 1]
    assert figures[:2] == ["  told 0.123 s", "  cut 3"]
    assert numbers_in(figures[2]) == [2, 5] and len(figures) == 3


@pytest.mark.slow
def test_run_counts_every_token_and_saves_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    flags = ["--streams", "5", "--frontends", "1", "--only", "every-token", "kill-engine", "--save", "faults"]
    assert bench_faults.main(flags) == 0
    every, killed = json.loads((tmp_path / "faults.json").read_text())["figures"]
    assert every["counts"] == {"streams: done": 5, "tokens missing or too many": 0}
    assert killed["counts"]["streams: error"] == 5 and killed["seconds"]["ready again"] > 0
