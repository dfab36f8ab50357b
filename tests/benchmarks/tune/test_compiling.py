"""Plans are compiled in processes of their own, for as long as there is time."""

import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from benchmarks.tune import compiling
from benchmarks.tune.__main__ import arguments_parser, list_layers, list_tasks
from benchmarks.tune.compiling import Job, compile_all, compile_one, identity, jobs_of, new_processes
from benchmarks.tune.shapes import LayerKey
from benchmarks.tune.timings import Timings
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, SplitKPlan
from tandem.engine_core.kernels.tiles.table import MatmulKey
from tests.fakes.gpus import H200, L4, RTX_5090
from tests.support.layer_codes import codes_of_a_layer
from tests.support.refusals import numbers_in

LAYER = LayerKey("16 bits", 16, hidden=256, queries=128, kv=64, width=512, vocabulary=128)
KEY = MatmulKey("product", 16, 256, 128, 16)
JOBS = {
    identity(job): job for job in (Job(LAYER, KEY, plan) for plan in (SplitKPlan(64, 64, 1), SplitKPlan(64, 128, 1)))
}


def test_the_traits_of_a_gpu_travel_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(H200)) == H200


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [H200, L4, RTX_5090], ids=lambda gpu: gpu.name)
def test_plans_of_every_format_are_compiled_without_a_gpu(gpu: GpuTraits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = ["--model", "8b", "--bits", "16", "8", "4", "--rows", "1", "16", "64", "--w8a8-rows", "16", "128"]
    options = arguments_parser().parse_args(command)
    jobs = jobs_of(list_tasks(options, gpu), list_layers(options, gpu), Timings(Path("none")))
    some = dict(list(jobs.items())[::29])
    said: list[str] = []
    found = compile_all(some, gpu, 600.0, said.append)
    assert set(found) == set(some)
    assert {some[code]: reason for code, reason in found.items() if reason} == {}


@pytest.mark.slow
def test_the_code_of_a_layer_is_that_of_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be compiled when it is timed, one plan after the other.

    The layer is wide enough for every product to have a choice.
    """
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    wide = LAYER._replace(hidden=1024, queries=1024, kv=256, width=2048)
    with new_processes(1) as pool:
        for name, rows in (
            ("4 bits", 1),
            ("4 bits", 16),
            ("8 bits", 1),
            ("16 bits", 4),
            ("16 bits", 16),
            ("blocks", 16),
            ("int8", 64),
        ):
            compiled, launched = pool.submit(codes_of_a_layer, wide._replace(format=name, rows=rows)).result()
            assert launched <= compiled, name


def test_a_plan_that_cannot_be_compiled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels cannot."""
    (job, *_) = JOBS.values()

    def launch(_job: Job, _gpu: GpuTraits) -> None:
        raise ValueError("the tile is too large\nfor this GPU")

    monkeypatch.setattr(compiling, "_launch", lambda _job, _gpu: None)
    assert compile_one(job, H200).startswith("nothing ")
    monkeypatch.setattr(compiling, "_launch", launch)
    assert compile_one(job, H200) == "ValueError: the tile is too large"


def test_a_plan_that_fails_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = JOBS

    def compile_one(job: Job, _gpu: GpuTraits) -> str:
        if job == JOBS[bad]:
            raise OSError("the disk is full")
        return ""

    monkeypatch.setattr(compiling, "compile_one", compile_one)
    said: list[str] = []
    found = compile_all(JOBS, H200, 60.0, said.append, ThreadPoolExecutor)
    assert found == {good: "", bad: "OSError('the disk is full')"}
    assert numbers_in(said[0])[:2] == [1, 2] and re.search(r"; 1\b.*OSError\('the disk is full'\)$", said[0])


def test_what_there_is_no_time_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread compiles; the second plan has not begun when the time is over."""
    begun, released = Event(), Event()

    def compile_one(_job: Job, _gpu: GpuTraits) -> str:
        begun.set()
        released.wait(120)
        return ""

    class Pool(ThreadPoolExecutor):
        def __init__(self, _count: int) -> None:
            super().__init__(1)

        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            assert begun.wait(120)  # the thread may not have taken the first plan yet
            super().shutdown(False, cancel_futures=cancel_futures)
            released.set()
            super().shutdown(wait)

    monkeypatch.setattr(compiling, "compile_one", compile_one)
    said: list[str] = []
    assert compile_all(JOBS, H200, 0.0, said.append, Pool) == {next(iter(JOBS)): ""}
    assert numbers_in(said[0])[:2] == [1, 2]


def test_products_share_code_whatever_their_number_of_outputs() -> None:
    job = Job(LAYER, KEY, SplitKPlan(64, 64, 1))

    def other(**fields: int) -> Job:
        return job._replace(key=KEY._replace(**fields))

    assert identity(job) == identity(other(outputs=512))
    assert identity(job) != identity(other(inputs=256))
    assert identity(job) != identity(other(rows=32))
    assert identity(job) == identity(other(rows=1)), "one row is padded to 16"
    one = [Job(LAYER, KEY._replace(rows=1), GemvPlan(rows, 1024)) for rows in (2, 4)]
    assert identity(one[0]) != identity(one[1])


def test_each_code_is_compiled_once_and_what_the_rules_take_first(tmp_path: Path) -> None:
    options = arguments_parser().parse_args(["--model", "1b", "--rows", "64", "1"])
    tasks, layers = list_tasks(options, H200), list_layers(options, H200)
    timings = Timings(tmp_path / "t.jsonl")
    jobs = jobs_of(tasks, layers, timings)
    plans = [Job(task.key, key, plan) for task in layers for key, listed in task.candidates.items() for plan in listed]
    plans += [Job(None, task.key, plan) for task in tasks for plan in task.plans]
    assert set(jobs) == {identity(job) for job in plans if job.plan is not None}
    firsts = [Job(task.key, key, listed[0]) for task in layers for key, listed in task.candidates.items()]
    firsts += [Job(None, task.key, task.plans[0]) for task in tasks]
    first = {identity(job) for job in firsts if job.plan is not None}
    assert set(list(jobs)[: len(first)]) == first
    for task in tasks:
        for plan in task.plans:
            timings.add(task.key, plan, 1.0)
    assert jobs_of(tasks, [], timings) == {}
