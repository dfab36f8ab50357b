"""Reports written from a file of measurements."""

import json
import re
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from benchmarks import report
from benchmarks.matrix.figures import Cell, Figures, Held, Measured, PrefillGaps, ServerFacts
from benchmarks.report import Saved, markdown, ratios
from tests.support.refusals import numbers_in


def figures(ttft: float, speed: float = 100.0) -> Figures:
    sample = {"p50": ttft, "p95": 2 * ttft, "p99": 3 * ttft}
    wait = {"mean": 4.5, "p50": 4.0}
    return Figures(48, 0, speed, sample, {"p50": 1.5}, {"p50": 2.0}, sample, wait, 2.5, 321.0, {0: sample, 2: {}})


def cell(server: str, load: str, ttft: float) -> Cell:
    return Cell(server, load, figures(ttft), [figures(ttft, speed) for speed in (90.0, 100.0, 105.0)])


MEASURED = Measured(
    {"device": "cuda", "gpu": "a GPU"},
    "--device cuda",
    {"W1": "256 in", "W3 cold": "1024 shared", "W3 warm": "1024 shared"},
    {
        "paged": ServerFacts("pages", "--max-rows 64", 7.5, {"max_waiting": 9, "cors": None}, {"depth": 2, "pages": 7}),
        "prefix": ServerFacts(
            "the tree", "--max-rows 8", 7.5, {"max_waiting": 9, "cors": "x"}, {"depth": 2, "pages": 8}
        ),
    },
    matrix=[
        *(cell("chunked", "W3 cold", 70.0), cell("chunked", "W3 warm", 80.0)),
        *(cell("prefix", "W3 cold", 60.0), cell("prefix", "W3 warm", 10.0)),
    ],
    policies=[cell("fcfs", "W1", 20.0)],
    held=[
        Held("continuous", 131072, 512, 32.0, 32.0, 32, 0, 9.5, 700.0),
        Held("paged", 131072, 512, 160.0, 150.0, 170, 4, 3.5, 2000.0),
        Held("chunked", 131072, 512, 480.0, 470.0, 512, 0, 3.5, 2000.0),
    ],
    prefill_gaps={
        "chunks of 512": PrefillGaps(
            {"p50": 1.0, "p99": 2.0},
            {"p50": 1.1, "p95": 1.2, "p99": 1.4},
            3000,
            8,
            {"p50": 90.0},
            {"p50": [1.25, 1.4, 1.5], "p99": [0.5, 0.7, 0.75]},
        ),
        "chunks of 9": PrefillGaps({"p50": 1.0}, {"count": 0}, 0, 8, {}, {"p50": [], "p99": []}),
    },
)
SAVED = Saved(
    {"git": "abc", "python": "3.12", "machine": {"processor": "a CPU"}, "versions": {"torch": "2.11"}},
    {"trials": 3, "starved_ms": 250.0, "scale": 1},
    MEASURED,
)


def test_report_states_origin_and_reading_instructions() -> None:
    text = markdown(SAVED, {})
    for said in ("a GPU", "a CPU", "git abc", "torch 2.11", "scale 1", "medians of 3 trials", "over 250.0 ms",
                 "`--device cuda`", "`--max-rows 64`", "the tree", "interpolated within buckets"):  # fmt: skip
        assert said in text
    assert "other work" not in text
    on_a_cpu = structs.replace(SAVED, figures=structs.replace(MEASURED, hardware={"device": "cpu"}))
    assert "other work" in markdown(on_a_cpu, {})


def test_report_lists_settings_and_shared_flags_once() -> None:
    text = markdown(SAVED, {})
    assert "): `max_waiting` 9." in text
    assert ": `depth` 2;" in text
    assert "| paged | `pages` 7 |" in text and "| prefix | `pages` 8 |" in text


def test_report_compares_configurations() -> None:
    cold, chunked, paged, limited, gaps = [line.replace(",", "") for line in ratios(MEASURED)]
    assert "W3 cold on prefix" in cold and numbers_in(cold) == [60, 6, 6, 6, 10]
    assert "W3 warm on chunked" in chunked and numbers_in(chunked) == [80, 8, 8, 8, 10]
    for line, server, numbers in (
        (paged, "paged", [131_072, 32, 160, 5, 4]),
        (limited, "chunked", [131_072, 32, 480, 15, 0, 512]),
    ):
        assert "on continuous (" in line and f"on {server} (" in line and numbers_in(line) == numbers
    assert numbers_in(gaps) == [512, 1.4, 3000, 1.4, 1.25, 1.5, 0.7, 0.5, 0.75]


def test_report_has_a_table_per_load_and_a_row_per_server() -> None:
    text = markdown(SAVED, {"matrix": "m.png"})
    assert text.count("| server | tokens/s |") == 3
    ttft = "10.00 / 20.00 / 30.00"
    row = f"| prefix | 100.0 (90.00 to 105.0) | {ttft} | {ttft} | 1.50 / - / - | 2.00 / - / - | 4.50 | 4.00 / - / - |"
    assert f"{row} 2.5 | 321.0 |" in text
    assert "| server | TTFT of priority 0 | TTFT of priority 2 |" in text
    assert "| fcfs | 20.00 / 40.00 / 60.00 | - / - / - |" in text
    assert "![matrix](m.png)" in text and "![policies]" not in text
    row = "| chunks of 512 | 8 | 90.00 | 1.00 / - / 2.00 | 3,000 | 1.10 / 1.20 / 1.40 | - |"
    assert f"{row} 1.40 (1.25 to 1.50) | 0.70 (0.50 to 0.75) |" in text
    assert "| chunks of 9 | 8 | - | 1.00 / - / - | 0 | - / - / - | - | - | - |" in text
    assert "| paged | 160.0 | 150.0 | 170 | 512 | 4 | 2,000 | 3.50 |" in text
    assert re.search(r"^\| chunked \| 480\.0 \(.*\brow limit\) \|", text, re.MULTILINE)
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")


def test_report_of_one_part_has_no_empty_sections() -> None:
    text = markdown(Saved({}, {}, Measured({}, "", {})), {})
    assert "## Matrix" not in text and "## Policies" not in text and "## Memory" not in text


def test_report_is_written_with_charts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.json"
    path.write_text(json.dumps(msgspec.to_builtins(SAVED)))
    report.main([str(path)])
    assert capsys.readouterr().out.strip() == str(tmp_path / "run.md")
    assert "run_matrix.png" in (tmp_path / "run.md").read_text()
    charts = {f"run_{part}.png" for part in ("matrix", "policies", "memory")}
    assert {file.name for file in tmp_path.iterdir()} == {"run.json", "run.md", *charts}


def test_report_without_matplotlib_tells_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(msgspec.to_builtins(SAVED)))
    with pytest.raises(SystemExit, match=r"pip install .*matplotlib"):
        report.main([str(path)])
