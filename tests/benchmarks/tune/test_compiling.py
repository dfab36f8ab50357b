"""Plans are compiled in processes of their own, for as long as there is time."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from benchmarks.tune import compiling
from benchmarks.tune.compiling import compile_all, identity
from benchmarks.tune.timings import AnyPlan, Key
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, SplitKPlan
from tandem.engine_core.kernels.tiles.table import ProductKey
from tests.fakes.gpus import H200

KEY = ProductKey("product", 16, 256, 128, 16)
JOBS: dict[tuple[object, ...], tuple[Key, AnyPlan]] = {
    identity(KEY, plan): (KEY, plan) for plan in (SplitKPlan(64, 64, 1), SplitKPlan(64, 128, 1))
}


def test_the_traits_of_a_gpu_travel_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(H200)) == H200


@pytest.mark.slow
def test_plans_are_compiled_in_processes_that_say_why_one_fails() -> None:
    """Without a GPU every plan fails."""
    said: list[str] = []
    found = compile_all(JOBS, H200, 120.0, said.append)
    assert set(found) == set(JOBS)
    failed = [reason for reason in found.values() if reason]
    (line,) = said
    assert line.startswith(f"compiled {2 - len(failed)} of 2 kernels in ")
    assert all(reason in line for reason in failed[:1])


def test_a_plan_that_fails_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = JOBS

    def compile_one(_key: Key, plan: AnyPlan, _gpu: GpuTraits) -> str:
        if plan == JOBS[bad][1]:
            raise OSError("the disk is full")
        return ""

    monkeypatch.setattr(compiling, "compile_one", compile_one)
    said: list[str] = []
    found = compile_all(JOBS, H200, 60.0, said.append, ThreadPoolExecutor)
    assert found == {good: "", bad: "OSError('the disk is full')"}
    assert said[0].startswith("compiled 1 of 2 kernels")
    assert said[0].endswith("1 do not run on this GPU, such as OSError('the disk is full')")


def test_what_there_is_no_time_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread compiles; the second plan has not begun when the time is over."""
    released = Event()

    def compile_one(_key: Key, _plan: AnyPlan, _gpu: GpuTraits) -> str:
        released.wait(30)
        return ""

    class Pool(ThreadPoolExecutor):
        def __init__(self, _count: int) -> None:
            super().__init__(1)

        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(False, cancel_futures=cancel_futures)
            released.set()
            super().shutdown(wait)

    monkeypatch.setattr(compiling, "compile_one", compile_one)
    said: list[str] = []
    assert compile_all(JOBS, H200, 0.0, said.append, Pool) == {next(iter(JOBS)): ""}
    assert said[0].startswith("compiled 1 of 2 kernels")


def test_products_share_code_whatever_their_number_of_outputs() -> None:
    plan = SplitKPlan(64, 64, 1)
    assert identity(KEY, plan) == identity(KEY._replace(outputs=512), plan)
    assert identity(KEY, plan) != identity(KEY._replace(inputs=256), plan)
    assert identity(KEY, plan) != identity(KEY._replace(rows=32), plan)
    one = KEY._replace(rows=1)
    assert identity(one, GemvPlan(2, 1024)) != identity(one, GemvPlan(4, 1024))
