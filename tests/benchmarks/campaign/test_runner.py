"""Campaigns: what is measured, left out, stopped and gone on with."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.campaign import runner
from benchmarks.campaign.plan import Group, Measurement
from benchmarks.campaign.runner import Places, Runner
from benchmarks.matrix.server import ServerDiedError

PROGRAM = """
import pathlib, subprocess, sys, time
from benchmarks.measuring import results
results.RESULTS = pathlib.Path(sys.argv[1])
if sys.argv[2] == "fail":
    sys.exit("no GPU here")
if sys.argv[2] == "cut":
    sys.exit(75)
if sys.argv[2] == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(sys.argv[1], "child").write_text(str(child.pid))
    time.sleep(600)
print(f"measured {sys.argv[2]}")
results.save(sys.argv[3], {}, {"url": sys.argv[2]})
"""


class Bench:
    """Runner of measurements that a small program stands for."""

    def __init__(self, folder: Path, seconds: float = 600.0) -> None:
        self.out, self.folder = folder / "out", folder
        self.out.mkdir(exist_ok=True)
        self.served: list[str] = []
        self.lines: list[str] = []
        self.runner = Runner(self.out, time.monotonic() + seconds, self.serve, self.lines.append)

    @contextmanager
    def serve(self, group: Group) -> Iterator[Places]:
        if group.name == "dead":
            raise ServerDiedError("exited with 1")
        self.served.append(group.name)
        yield {"url": "http://here"} if group.shape else {}

    def measurement(self, name: str, what: str = "{url}", seconds: int = 60) -> Measurement:
        return Measurement(name, seconds, f"stand_in {self.folder} {what} {{name}}")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    (tmp_path / "stand_in.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3]}:{Path(__file__).parents[3] / 'src'}")
    monkeypatch.setattr(runner.results, "RESULTS", tmp_path)
    return Bench(tmp_path)


def outcomes(bench: Bench, *groups: Group) -> dict[str, str]:
    return {run.name: run.outcome for run in bench.runner.run(groups)}


def test_measurements_run_beside_their_server_and_their_results_are_kept(bench: Bench) -> None:
    first = Group("first", [bench.measurement("one"), bench.measurement("two", "fail")], shape="llama-3.2-1b")
    alone = Group("alone", [bench.measurement("three", "nothing")])
    assert outcomes(bench, first, alone) == {"one": "done", "two": "failed", "three": "done"}
    assert bench.served == ["first", "alone"]
    assert json.loads((bench.out / "one.json").read_text())["figures"] == {"url": "http://here"}
    assert (bench.out / "one.log").read_text() == "measured http://here\n"
    assert "no GPU here" in "".join(bench.lines)
    assert bench.runner.done() == {"one", "three"}, "a campaign that goes on measures what failed again"


def test_a_measurement_that_hangs_is_stopped_with_its_children(bench: Bench) -> None:
    hanging = Group("first", [bench.measurement("one", "hang", seconds=1), bench.measurement("two", "next")])
    assert outcomes(bench, hanging) == {"one": "stopped", "two": "done"}
    child = Path("/proc", (bench.folder / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_a_measurement_that_ran_out_of_time_goes_on_later(bench: Bench) -> None:
    assert outcomes(bench, Group("first", [bench.measurement("one", "cut")])) == {"one": "stopped"}
    assert bench.runner.done() == set()


@pytest.mark.usefixtures("bench")
def test_what_does_not_fit_the_time_is_left_out(tmp_path: Path) -> None:
    short = Bench(tmp_path, seconds=30.0)
    slow = Group("slow", [short.measurement("one", seconds=20)], shape="llama-3.2-1b", start_seconds=20)
    mixed = Group("mixed", [short.measurement("two", "a", seconds=60), short.measurement("three", "b", seconds=10)])
    assert outcomes(short, slow, mixed) == {"one": "left out", "two": "left out", "three": "done"}
    assert short.served == ["mixed"], "no server starts for nothing"


def test_a_server_that_does_not_start_costs_its_own_group(bench: Bench) -> None:
    dead = Group("dead", [bench.measurement("one")], shape="llama-3.2-1b")
    alone = Group("alone", [bench.measurement("two", "a")])
    assert outcomes(bench, dead, alone) == {"one": "failed", "two": "done"}


def test_a_result_of_an_earlier_commit_is_not_taken_for_a_new_one(bench: Bench) -> None:
    (bench.folder / "one.json").write_text("{}")
    assert outcomes(bench, Group("first", [bench.measurement("one", "fail")])) == {"one": "failed"}
    assert not (bench.out / "one.json").exists()


def test_a_line_that_was_cut_off_is_measured_again(bench: Bench) -> None:
    groups = [Group("first", [bench.measurement("one", "a"), bench.measurement("two", "b")])]
    bench.runner.run(groups)
    runs = bench.runner.runs_file
    runs.write_bytes(runs.read_bytes()[:-9])
    assert bench.runner.done() == {"one"}
    bench.runner.run([Group("again", [bench.measurement("two", "b"), bench.measurement("three", "c")])])
    assert bench.runner.done() == {"one", "two", "three"}
