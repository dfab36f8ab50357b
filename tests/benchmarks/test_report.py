"""Reports written from a file of measurements."""

import json
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from benchmarks import report
from benchmarks.matrix.figures import Cell, Figures, Held, Measured, PrefillGaps, ServerFacts
from benchmarks.report import Saved, markdown, ratios


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
    assert "other work shares" not in text
    on_a_cpu = structs.replace(SAVED, figures=structs.replace(MEASURED, hardware={"device": "cpu"}))
    assert "other work shares" in markdown(on_a_cpu, {})


def test_report_lists_settings_and_shared_flags_once() -> None:
    text = markdown(SAVED, {})
    assert "left to the engine): `max_waiting` 9." in text
    assert "decided alike: `depth` 2; and" in text
    assert "| paged | `pages` 7 |" in text and "| prefix | `pages` 8 |" in text


def test_report_compares_configurations() -> None:
    assert list(ratios(MEASURED)) == [
        "TTFT p50 of W3 cold on prefix, 60.00 ms, is 6.00 (6.00 to 6.00) times that of W3 warm on prefix, 10.00 ms",
        "TTFT p50 of W3 warm on chunked, 80.00 ms, is 8.00 (8.00 to 8.00) times that of W3 warm on prefix, 10.00 ms",
        "sequences of W2's lengths at once in 131,072 KV tokens: 32.00 on continuous (contiguous regions), 160.0 on "
        "paged (pages), 5.0 times as many; preempted 4 times",
        "sequences of W2's lengths at once in 131,072 KV tokens: 32.00 on continuous (contiguous regions), 480.0 on "
        "chunked (pages), 15.0 times as many; preempted 0 times; the limit of 512 rows bounds it",
        "gaps of running streams while a long prompt is computed in chunks of 512: p99 1.40 ms of 3,000 gaps; 1.40 "
        "(1.25 to 1.50) times the p50 and 0.70 (0.50 to 0.75) times the p99 of the same streams alone",
    ]


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
    assert "| chunked | 480.0, of which the row limit is a bound |" in text
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
