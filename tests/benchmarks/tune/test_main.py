"""The command, with a GPU and times that are made up, writes a table which the engine reads."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.tune import __main__ as tune
from benchmarks.tune.compiling import Identity
from benchmarks.tune.timings import AnyPlan, Key
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan
from tandem.engine_core.kernels.tiles.table import ByteProductKey, DecodeKey, ProductKey
from tandem.engine_core.kernels.tiles.table_file import read_table
from tests.fakes.gpus import H200, L4

TARGET = ProductKey("normed", 16, 3072, 2048, 1)
BEST = GemvPlan(4, 2048, 2, 8)


class MadeUpTimer:
    """Times of 10 to 11 us, but for one plan that is twice as fast."""

    timed = 0

    def __init__(self, _gpu: GpuTraits) -> None:
        self.random = random.Random(0)

    def __call__(self, key: Key, plan: AnyPlan) -> float:
        type(self).timed += 1
        return 5.0 if (key, plan) == (TARGET, BEST) else self.random.uniform(10, 10.1)


def compile_at_once(
    jobs: dict[Identity, tuple[Key, AnyPlan]], _gpu: GpuTraits, _seconds: float, report: Callable[[str], None]
) -> dict[Identity, str]:
    report(f"compiled {len(jobs)}")
    return dict.fromkeys(jobs, "")


@pytest.mark.parametrize("gpu", [H200, L4], ids=lambda gpu: gpu.name)
def test_a_run_writes_a_table_and_a_second_one_goes_on_from_its_times(
    gpu: GpuTraits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "read_gpu_traits", lambda: gpu)
    monkeypatch.setattr(tune, "compile_all", compile_at_once)
    monkeypatch.setattr(tune, "Timer", MadeUpTimer)
    monkeypatch.setattr(MadeUpTimer, "timed", 0)
    out = tmp_path / "new" / "table.json"
    command = ["--model", "1b", "--rows", "1", "64", "--out", str(out), "--timings", str(tmp_path / "t.jsonl")]
    assert tune.main(command) == 0
    table = read_table(out)
    assert table.device == gpu.name
    assert table.products[TARGET] == BEST
    assert {key: plan for key, plan in table.products.items() if key != TARGET} == dict(gpu.tiles.products)
    assert dict(table.decode) == {}
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("normed 16 bits 3072x2048"))
    assert "best     5.00" in line
    assert repr(BEST) in line
    timed, text = MadeUpTimer.timed, out.read_text()
    assert tune.main(command) == 0
    assert (MadeUpTimer.timed, out.read_text()) == (timed, text)


def test_products_of_bytes_are_written_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up times leave today's plans; the library's times are half of them."""

    class Timer(MadeUpTimer):
        def __call__(self, key: Key, plan: AnyPlan) -> float:
            return 5.0 if plan is None else super().__call__(key, plan)

    monkeypatch.setattr(tune, "read_gpu_traits", lambda: H200)
    monkeypatch.setattr(tune, "compile_all", compile_at_once)
    monkeypatch.setattr(tune, "Timer", Timer)
    out = tmp_path / "table.json"
    command = ["--model", "8b", "--only", "bytes", "--byte-rows", "128", "--formats", "blocks", "int8", "tensor"]
    assert tune.main([*command, "--out", str(out), "--timings", str(tmp_path / "t.jsonl")]) == 0
    found = read_table(out).byte_products
    ours = ((6144, 4096), (4096, 14336), (4096, 4096))
    assert found == {ByteProductKey("fp8", "block", *shape, 128): None for shape in ours}


def test_a_run_without_time_keeps_the_table_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "read_gpu_traits", lambda: H200)
    monkeypatch.setattr(tune, "compile_all", compile_at_once)
    monkeypatch.setattr(tune, "Timer", MadeUpTimer)
    out = tmp_path / "table.json"
    assert tune.main(["--minutes", "0", "--out", str(out), "--timings", str(tmp_path / "t.jsonl")]) == 0
    assert read_table(out) == H200.tiles
    assert "time ran out, run it again to go on" in capsys.readouterr().out


def test_a_plan_that_does_not_run_takes_forever_and_a_lost_device_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timer = tune.Timer(H200)

    def fail(message: str) -> Callable[[Key, AnyPlan], float]:
        def run(_key: Key, _plan: AnyPlan) -> float:
            raise RuntimeError(message)

        return run

    monkeypatch.setattr(timer, "products", fail("out of resource: shared memory"))
    assert timer(TARGET, BEST) == float("inf")
    assert "out of resource" in capsys.readouterr().out
    monkeypatch.setattr(timer, "bytes", lambda _key, plan: 7.0 if plan is None else 8.0)
    assert timer(ByteProductKey("fp8", "tensor", 4096, 4096, 64), None) == 7.0
    monkeypatch.setattr(timer, "decode", fail("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="broke the device"):
        timer(DecodeKey(64, 16, 512), BEST)
