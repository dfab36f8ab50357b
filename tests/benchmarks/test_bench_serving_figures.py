"""Percentiles, goodput and sums, worked out by hand."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.bench_serving import arguments_parser, loads
from benchmarks.measuring.plots import PlottingUnavailableError, plot_serving, pyplot
from benchmarks.serving.reference import load_reference
from benchmarks.serving.table import number, reference_table, remarks, table
from tandem.frontend.cli.bench.distribution import distribution, percentile
from tandem.frontend.cli.bench.level import Level, Slo, summarise
from tandem.frontend.cli.bench.record import Record, Share
from tandem.frontend.cli.bench.workloads import Load

REFERENCE = Path(__file__).parents[2] / "benchmarks" / "reference" / "vllm_0_26.json"
SLO = Slo(ttft_ms=100.0, tpot_ms=10.0)


def record(index: int, ttft: float, tpot: float, tokens: int = 11, start: float = 0.0) -> Record:
    """Make a complete reply with a response that ends 0.05 s after its last token."""
    first = start + ttft
    last = first + tpot * (tokens - 1)
    return Record(index, 11, start, 0.0, first, last, last + 0.05, tokens, 20, "usage", [tpot] * (tokens - 1))


def level(streams: int = 4) -> Level:
    good = record(0, ttft=0.1, tpot=0.01)
    slow_start = record(1, ttft=0.2, tpot=0.005)
    slow_tokens = record(2, ttft=0.05, tpot=0.02, start=0.5)
    refused = Record(3, 11, start=0.0, end=0.01, error="HTTP 503", detail="full")
    shares = [Share([good, slow_start], cpu_seconds=0.1), Share([slow_tokens, refused], cpu_seconds=0.4)]
    return summarise(Load(f"{streams} streams", streams, requests=1), shares, SLO)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
@settings(deadline=None, max_examples=50)
def test_percentile_matches_numpy(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_percentile_of_small_samples() -> None:
    assert [percentile([10.0, 20.0, 30.0, 40.0], percent) for percent in (0, 50, 75, 100)] == [10.0, 25.0, 32.5, 40.0]
    assert percentile([3.0], 99) == 3.0
    assert distribution([]) == {"count": 0}
    summary = distribution([0.003, 0.001, 0.002], 1e3)
    assert (summary["count"], summary["mean"], summary["p50"], summary["max"]) == (3, 2.0, 2.0, 3.0)


def test_goodput_requires_both_objectives() -> None:
    assert SLO.met(record(0, ttft=0.0999, tpot=0.0099))
    assert not SLO.met(record(0, ttft=0.1001, tpot=0.0099))
    assert not SLO.met(record(0, ttft=0.0999, tpot=0.0101))
    assert SLO.met(record(0, ttft=0.0999, tpot=5.0, tokens=1))
    failed = record(0, ttft=0.01, tpot=0.001)
    failed.error = "cut off"
    assert not SLO.met(failed)


def test_level_sums_its_records() -> None:
    figures = level()
    assert figures.seconds == pytest.approx(0.8)
    assert (figures.completed, figures.errors) == (3, {"HTTP 503": 1})
    assert (figures.output_tokens, figures.prompt_tokens) == (33, 60)
    assert figures.output_tokens_per_s == pytest.approx(33 / 0.8)
    assert figures.total_tokens_per_s == pytest.approx(93 / 0.8)
    assert figures.requests_per_s == pytest.approx(3 / 0.8)
    # 0.25 + 0.30 + 0.30 s of replies and 0.01 s of a refusal.
    assert figures.concurrency == pytest.approx(0.86 / 0.8)
    assert figures.ttft_ms["mean"] == pytest.approx(350 / 3)
    assert figures.tpot_ms["p50"] == pytest.approx(10.0)
    assert figures.itl_ms["count"] == 30
    assert (figures.goodput.good, figures.goodput.share) == (1, 0.25)
    assert figures.goodput.requests_per_s == pytest.approx(1 / 0.8)
    assert figures.client_cpu_percent == pytest.approx([12.5, 50.0])
    assert figures.error_example == "HTTP 503: full"


def test_level_without_replies_has_no_latency() -> None:
    failed = Record(0, 5, start=1.0, end=2.0, error="timed out")
    figures = summarise(Load("1 stream", 1, requests=1), [Share([failed], 0.0)], SLO)
    assert (figures.completed, figures.output_tokens_per_s, figures.ttft_ms) == (0, 0.0, {"count": 0})
    assert "TTFT ms p50             -" in table([figures])
    assert summarise(Load("1 stream", 1, requests=1), [Share([], 0.0)], SLO).seconds == 0.0


def test_remarks_name_what_invalidates_a_column() -> None:
    short = record(0, ttft=0.1, tpot=0.01, tokens=5)
    short.counted_by = "chunks"
    figures = summarise(Load("2 streams", 2, requests=1), [Share([short], cpu_seconds=1.0)], SLO)
    said = "\n".join(remarks([figures]))
    assert "1 replies" in said and "{'chunks': 1}" in said and "--clients" in said
    assert "HTTP 503" in "\n".join(remarks([level()]))


def test_reference_table_has_the_columns_of_the_levels() -> None:
    reference = load_reference(REFERENCE)
    assert "H200" in reference.machine and "previous measurement" in reference.note
    text = reference_table([level(1), level(64)], reference)
    assert "454.0        14,400" in text and "-        16,100" in text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0, "0"), (1234, "1,234"), (1234.5, "1,234"), (123.44, "123.4"), (0.5, "0.50")]
)
def test_number_formats_counts_and_measurements(value: float | None, text: str) -> None:
    assert number(value) == text


def test_flags_define_the_loads() -> None:
    parse = arguments_parser().parse_args
    common = ["--url", "http://h", "--model", "m"]
    assert [load.streams for load in loads(parse(common))] == [1, 16, 64, 256]
    assert loads(parse([*common, "--streams", "2", "--duration", "3"])) == [Load("2 streams", 2, duration=3.0)]
    assert loads(parse([*common, "--rate", "4", "--requests", "9"])) == [Load("4/s", rate=4.0, requests=9)]
    with pytest.raises(ValueError, match="exclude"):
        loads(parse([*common, "--rate", "4", "--streams", "1", "--requests", "9"]))
    with pytest.raises(ValueError, match=r"\bnumber of requests\b.*\bduration\b"):
        loads(parse([*common, "--rate", "4"]))


def test_plot_without_matplotlib_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlottingUnavailableError, match=r"pip install .*matplotlib"):
        pyplot()


def test_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_serving(tmp_path / "levels.png", "title", [level(1), level(64)], load_reference(REFERENCE))
    assert (tmp_path / "levels.png").read_bytes().startswith(b"\x89PNG")
