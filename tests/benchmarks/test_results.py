"""Results of a benchmark in their file, or on stdout where there can be none."""

import json
from pathlib import Path

import pytest

from benchmarks.measuring import results


def test_results_are_written_with_their_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "new")
    saved = json.loads(results.save("one", {"streams": 3}, [1.5]).read_text())
    assert (saved["config"], saved["figures"]) == ({"streams": 3}, [1.5]) and saved["origin"]


def test_results_are_printed_where_their_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(results, "RESULTS", tmp_path / "file")
    with pytest.raises(SystemExit, match=r"/one\.json .*\(.+\)"):
        results.save("one", {"streams": 3}, [1.5])
    assert json.loads(capsys.readouterr().out)["figures"] == [1.5]
