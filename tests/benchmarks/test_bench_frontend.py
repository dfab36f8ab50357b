"""What the benchmark of frontends computes from arrivals and the engine's journal, and one short run of it."""

import json
from array import array
from pathlib import Path

import pytest

from benchmarks import bench_frontend
from benchmarks.bench_frontend import added_first, delays_of, rate_of
from benchmarks.frontends.load import Arrivals, Probes, Share
from benchmarks.measuring import results
from tests.fakes.scripted_engine import Journal

JOURNAL = Journal([10.0, 10.5, 11.0, 11.5], {"a": [1], "b": [2]}, {"a": [9.0], "b": [10.25]})


def test_delay_of_each_token_is_counted_from_its_own_step() -> None:
    """The first read lies before the measured time; the second brings two tokens."""
    arrivals = Arrivals("a", 8.0, 10.125, array("d", [10.125, 11.25, 12.0]), array("I", [1, 2, 1]))
    delays, gaps = delays_of([Share(3, 10.5, 0.0, [arrivals])], JOURNAL)
    assert delays == [0.25, 0.5, 0.75]
    assert gaps == [0.75, 1.125]


def test_time_to_a_first_token_leaves_out_the_engines_own() -> None:
    probes = Probes([("b", 10.0, 11.0), ("a", 8.5, 10.25)], [])
    assert added_first(probes, JOURNAL) == [0.75, 0.75]


@pytest.mark.parametrize(("streams", "asked", "rate"), [(1, None, 200), (64, None, 100), (2048, None, 5), (64, 7, 7)])
def test_rate_of_a_stream_falls_with_their_number(streams: int, asked: float | None, rate: float) -> None:
    assert rate_of(streams, asked) == rate


@pytest.mark.slow
def test_run_saves_figures_of_streams_and_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    bench_frontend.main(["--streams", "3", "--requests", "chat", "--seconds", "1", "--save", "frontend"])
    figures = json.loads((tmp_path / "frontend.json").read_text())["figures"]
    assert figures["streams"][0]["received"] > 100 and figures["streams"][0]["cpu_us"] > 0
    assert figures["requests"][0]["kind"] == "chat" and figures["requests"][0]["cpu_us"] > 0
