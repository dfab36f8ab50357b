"""The comparison with vLLM, run whole against a scripted server."""

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks import side_by_side
from benchmarks.measuring import results
from benchmarks.side_by_side import FIGURES, Comparison, main, read_loads
from tests.fakes.completions_server import CompletionsServer
from tests.fakes.http_server import Answer, scripted_server
from tests.support.engine_metrics import metrics_after

TINY = {
    "origin": "a machine",
    "loads": [
        {"name": "one", "shape": "tiny", "streams": 3, "input_len": "2:5", "output_len": "7", "requests": 2,
         "vllm": [111, 22, 3.5]},
        {"name": "two", "shape": "tiny", "streams": 1, "input_len": "4", "output_len": "6", "requests": 1,
         "temperature": 0.8, "top_p": 0.95},
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiny_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "loads.json"
    path.write_text(json.dumps(TINY))
    monkeypatch.setattr(side_by_side, "LOADS", path)
    monkeypatch.setattr(results, "RESULTS", tmp_path)


def flags(server: CompletionsServer, *more: str) -> list[str]:
    return ["--url", f"http://127.0.0.1:{server.port}", "--model", "m", "--shape", "tiny", "--clients", "1", *more]


def test_every_load_is_run_with_its_own_prompts_in_each_trial(
    served: CompletionsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(flags(served, "--trials", "2", "--save", "out"))
    one = [body for body in served.bodies if body["temperature"] == 0.0]
    two = [body for body in served.bodies if body["temperature"] == 0.8]
    assert len(one) == 2 * (3 + 6) and len(two) == 2 * (1 + 1)
    assert {body["max_tokens"] for body in one} == {7} and all("top_p" not in body for body in one)
    assert {(body["max_tokens"], len(body["prompt"]), body["top_p"]) for body in two} == {(6, 4, 0.95)}
    assert len({tuple(body["prompt"]) for body in one}) == len(one)
    saved = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert [load["load"]["name"] for load in saved["loads"]] == ["one", "two"]
    for load in saved["loads"]:
        assert load["failed"] == 0 and [*load["figures"]] == [*FIGURES]
        for middle, least, most in load["figures"].values():
            assert 0 <= least <= middle <= most
    shown = capsys.readouterr().out
    assert "111" in shown and "a machine" in shown


def test_chosen_loads_are_run_in_the_order_given(served: CompletionsServer, capsys: pytest.CaptureFixture[str]) -> None:
    main(flags(served, "--trials", "1", "--loads", "two"))
    assert len(served.bodies) == 2
    assert "two" in capsys.readouterr().out


def test_engine_counters_are_those_of_the_trials_without_their_warm_up(
    served: CompletionsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps and ends before and after a warm-up of 3 requests and a trial of 6, twice."""
    readings = [(0, 0), (5, 3), (5, 3), (25, 9), (25, 9), (35, 12), (35, 12), (65, 18)]
    with scripted_server(*(Answer(200, metrics_after(*one).encode()) for one in readings)) as metrics:
        main(flags(served, "--trials", "2", "--loads", "one", "--metrics", f"{metrics.url}/metrics", "--save", "out"))
        assert len(metrics.requests) == len(readings)
    engine = json.loads((tmp_path / "out.json").read_text())["figures"]["loads"][0]["engine"]
    assert (engine["steps"], engine["rows_a_step"]) == (20 + 30, 64)
    assert "GPU idle 25.0 %" in capsys.readouterr().out


def test_failed_requests_are_counted(served: CompletionsServer, capsys: pytest.CaptureFixture[str]) -> None:
    served.ways = ["good", "good", "good", "refuse", "good"]
    main(flags(served, "--trials", "1", "--loads", "one"))
    assert "1 requests failed" in capsys.readouterr().out


def test_a_server_that_refuses_everything_ends_the_run(served: CompletionsServer) -> None:
    served.ways = ["refuse"]
    with pytest.raises(SystemExit, match=r"\bwarmup one 0\b.*\bfull\b"):
        main(flags(served, "--loads", "one"))


@pytest.mark.parametrize(
    ("shape", "loads", "message"),
    [("7b", [], "are tiny"), ("tiny", ["three"], "of tiny are one, two")],
)
def test_unknown_names_are_refused_with_the_known_ones(
    shape: str, loads: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--loads", *loads] if loads else []
    with pytest.raises(SystemExit) as refused:
        main(["--url", "http://127.0.0.1:1", "--model", "m", "--shape", shape, *chosen])
    assert refused.value.code == 2 and message in capsys.readouterr().err


def test_the_loads_of_the_comparison_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(side_by_side.__file__).parent / "reference" / "side_by_side.json"
    shapes = {load.shape for load in msgspec.json.decode(path.read_bytes(), type=Comparison).loads}
    monkeypatch.setattr(side_by_side, "LOADS", path)
    assert {shape: len(read_loads(shape, None)[1]) for shape in shapes} == {"llama-3.2-1b": 8, "llama-3.1-8b": 6}
