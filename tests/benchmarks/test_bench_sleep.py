"""A run of the benchmark of sleeps on a CPU, with the default model."""

import json
from pathlib import Path

import pytest

from benchmarks import bench_sleep
from benchmarks.bench_sleep import Round, line
from tests.support.refusals import numbers_in


def test_each_level_and_round_is_measured_and_saved(tmp_path: Path) -> None:
    out = tmp_path / "sleep.json"
    assert bench_sleep.main(["--device", "cpu", "--levels", "1", "2", "--rounds", "2", "--out", str(out)]) == 0
    saved = json.loads(out.read_text())
    assert saved["origin"]["versions"] and saved["config"]["levels"] == [1, 2] and saved["config"]["device"] == "cpu"
    assert saved["figures"]["outputs_repeat"]
    rounds = saved["figures"]["rounds"]
    assert [(found["level"], found["round"]) for found in rounds] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    (released,) = {found["released_bytes"] for found in rounds}
    assert released > 1_000_000, "weights and KV of the default model"
    for found in rounds:
        assert found["outputs_equal"] and found["free_growth_bytes"] is None
        assert found["sleep_seconds"] > 0 and found["wake_seconds"] > 0


def test_no_rounds_are_refused() -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_sleep.main(["--device", "cpu", "--rounds", "0"])


def test_line_of_a_round_has_its_figures() -> None:
    found = Round(2, 3, 0.25, 0.5, 16 * 10**9, None, True)
    assert numbers_in(line(found)) == [2, 3, 0.25, 0.5, 16] and "DIFFER" not in line(found)
    found = Round(1, 1, 0.25, 0.5, 16 * 10**9, 17 * 10**9, False)
    assert numbers_in(line(found))[-1] == 17 and "DIFFER" in line(found)
