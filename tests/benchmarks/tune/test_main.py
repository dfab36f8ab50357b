"""The command, with a GPU and times that are made up, writes a table which the engine reads."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.measuring.processes import CUT_OFF
from benchmarks.tune import __main__ as tune
from benchmarks.tune.__main__ import arguments_parser, layer_task, line_of, lines_of, list_layers, list_tasks
from benchmarks.tune.compiling import Identity, Job
from benchmarks.tune.descent import Found, Round
from benchmarks.tune.layers import LayerPlans
from benchmarks.tune.shapes import LayerKey, layer_key, read_models
from benchmarks.tune.timings import Choice, Timings
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.tiles.plan_types import DecodePlan, GemvPlan, SplitKPlan
from tandem.engine_core.kernels.tiles.table import DecodeKey, MatmulKey, W8A8GemmKey
from tandem.engine_core.kernels.tiles.table_file import read_table
from tests.fakes.gpus import H200, L4
from tests.support.refusals import numbers_in

TARGET = MatmulKey("product", 4, 2048, 8192, 1)
BEST = GemvPlan(4, 1024, 1, 1)


class MadeUpDecode:
    """Times of decode attention of about 10 us."""

    timed = 0

    def __init__(self, _gpu: GpuTraits) -> None:
        self.random = random.Random(0)

    def __call__(self, _key: DecodeKey, _plan: DecodePlan) -> float:
        type(self).timed += 1
        return self.random.uniform(10, 10.1)


class MadeUpLayers:
    """Times of a layer of about 100 us, but 80 with one plan of one product."""

    timed = 0

    def __init__(self, _gpu: GpuTraits) -> None:
        self.random = random.Random(0)

    def __call__(self, _layer: LayerKey, plans: LayerPlans) -> float:
        type(self).timed += 1
        return (80.0 if plans.get(TARGET) == BEST else 100.0) + self.random.uniform(0, 0.4)


def compile_at_once(
    jobs: dict[Identity, Job], _gpu: GpuTraits, _seconds: float, report: Callable[[str], None]
) -> dict[Identity, str]:
    report(f"compiled {len(jobs)}")
    return dict.fromkeys(jobs, "")


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "read_gpu_traits", lambda: H200)
    monkeypatch.setattr(tune, "compile_all", compile_at_once)
    monkeypatch.setattr(tune, "DecodeTimer", MadeUpDecode)
    monkeypatch.setattr(tune, "LayerTimer", MadeUpLayers)
    monkeypatch.setattr(MadeUpDecode, "timed", 0)
    monkeypatch.setattr(MadeUpLayers, "timed", 0)


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("gpu", [H200, L4], ids=lambda gpu: gpu.name)
def test_a_run_writes_a_table_and_a_second_one_goes_on_from_its_times(
    gpu: GpuTraits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "read_gpu_traits", lambda: gpu)
    out = tmp_path / "new" / "table.json"
    command = ["--model", "1b", "--bits", "4", "16", "--rows", "1", "64"]
    command += ["--out", str(out), "--timings", str(tmp_path / "t.jsonl")]
    assert tune.main(command) == 0
    table = read_table(out)
    assert table.device == gpu.name
    assert table.products[TARGET] == BEST
    assert {key: plan for key, plan in table.products.items() if key != TARGET} == dict(gpu.tiles.products)
    assert dict(table.decode) == dict(gpu.tiles.decode)
    lines = capsys.readouterr().out.splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith("4 bits, 2048 wide, 1 row "))
    assert "best    80." in lines[place]
    assert lines[place + 1] == f"    product 2048x8192: {BEST}"
    assert '"block_k": 1024, "tiles": 1, "warps": 1}' in out.read_text()
    timed, text = (MadeUpDecode.timed, MadeUpLayers.timed), out.read_text()
    assert tune.main(command) == 0
    assert ((MadeUpDecode.timed, MadeUpLayers.timed), out.read_text()) == (timed, text)
    assert "compiled" not in capsys.readouterr().out


@pytest.mark.usefixtures("made_up")
def test_products_of_bytes_are_written_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library saves a fifth of the layer's time for each product that it multiplies."""

    class Layers(MadeUpLayers):
        def __call__(self, _layer: LayerKey, plans: LayerPlans) -> float:
            return 100.0 - 20 * list(plans.values()).count(None)

    monkeypatch.setattr(tune, "LayerTimer", Layers)
    out = tmp_path / "table.json"
    command = ["--model", "8b", "--only", "w8a8", "--w8a8-rows", "128", "--formats", "blocks", "int8", "tensor"]
    assert tune.main([*command, "--out", str(out), "--timings", str(tmp_path / "t.jsonl")]) == 0
    found = {key: plan for key, plan in read_table(out).byte_products.items() if key.rows == 128}
    ours = ((6144, 4096), (4096, 14336), (4096, 4096))
    assert found == {W8A8GemmKey("fp8", "block", *shape, 128): None for shape in ours}


@pytest.mark.usefixtures("made_up")
def test_a_run_without_time_keeps_the_table_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    assert tune.main(["--minutes", "0", "--out", str(out), "--timings", str(tmp_path / "t.jsonl")]) == CUT_OFF
    assert read_table(out) == H200.tiles


@pytest.mark.usefixtures("made_up")
def test_a_run_that_could_not_compile_all_goes_on_in_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["--model", "1b", "--bits", "4", "--rows", "1", "--only", "matmuls"]
    command += ["--out", str(tmp_path / "table.json"), "--timings", str(tmp_path / "t.jsonl")]
    with monkeypatch.context() as patched:
        patched.setattr(tune, "compile_all", lambda jobs, *_: dict.fromkeys(list(jobs)[:3], ""))
        assert tune.main(command) == CUT_OFF
    assert tune.main(command) == 0
    assert read_table(tmp_path / "table.json").products[TARGET] == BEST


def test_a_plan_that_does_not_run_takes_forever_and_a_lost_device_ends_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(message: str) -> Callable[[object, object], float]:
        def run(_key: object, _plan: object) -> float:
            raise RuntimeError(message)

        return run

    assert tune.guarded(lambda _key, _plan: 7.0, TARGET, BEST) == 7.0
    assert tune.guarded(fail("out of resource: shared memory"), TARGET, BEST) == float("inf")
    assert "out of resource" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="broke the device"):
        tune.guarded(fail("CUDA error: an illegal memory access was encountered"), TARGET, BEST)


def test_a_share_of_the_tasks_can_be_asked_for() -> None:
    names = []
    for more in ([], ["--only", "decode"], ["--only", "matmuls"], ["--only", "w8a8"], ["--bits", "16", "8"]):
        options = arguments_parser().parse_args(["--model", "1b", *more])
        keys = [key for task in list_layers(options, H200) for key in task.candidates]
        keys += [task.key for task in list_tasks(options, H200)]
        names.append({type(key).__name__ for key in keys})
    every = {"MatmulKey", "DecodeKey", "W8A8GemmKey"}
    assert names == [{"MatmulKey", "DecodeKey"}, {"DecodeKey"}, {"MatmulKey"}, {"W8A8GemmKey"}, every]


def test_layers_come_by_their_rows_for_all_models() -> None:
    command = ["--model", "1b", "8b", "--rows", "64", "1", "--w8a8-rows", "256", "--bits", "16", "8"]
    layers = [task.key for task in list_layers(arguments_parser().parse_args([*command, "--formats", "blocks"]), H200)]
    assert [(layer.rows, layer.format, layer.hidden) for layer in layers] == [
        (64, "16 bits", 2048), (64, "16 bits", 4096), (64, "8 bits", 2048), (64, "8 bits", 4096),
        (256, "blocks", 2048), (256, "blocks", 4096),
        (1, "16 bits", 2048), (1, "16 bits", 4096), (1, "8 bits", 2048), (1, "8 bits", 4096),
    ]  # fmt: skip


def test_a_layer_without_a_kernel_of_ours_is_left_out() -> None:
    """More than 64 rows of four bits are made into numbers for the library."""
    assert list_layers(arguments_parser().parse_args(["--model", "8b", "--bits", "4", "--rows", "128"]), H200) == []


def test_lines_name_keys_times_and_plans(tmp_path: Path) -> None:
    (task,) = (one for one in list_tasks(arguments_parser().parse_args(["--model", "1b", "--only", "decode"]), H200)
               if one.key == DecodeKey(64, 16, 512))  # fmt: skip
    line = line_of(Choice(task, task.plans[1], 9.0, 10.0, None))
    assert re.search(r"\bdecode head_dim 64\b.* 16 bits\b.* 512\b", line)
    assert "10.0%" in line
    assert repr(task.plans[1]) in line
    layer = layer_task(layer_key(read_models(["8b"])[0], "4 bits", 32), H200)
    timings = Timings(tmp_path / "t.jsonl")
    down = MatmulKey("product", 4, 4096, 14336, 32)
    plans = {**layer.today, down: SplitKPlan(128, 128, 8)}
    assert lines_of(Found(layer, plans, True), timings) == [f"{'4 bits, 4096 wide, 32 rows':44} not timed"]
    timings.add(Round(layer.key, 0), tuple(layer.today.values()), 96.0)
    timings.add(Round(layer.key, 0), tuple(plans.values()), 72.0)
    first, second = lines_of(Found(layer, plans, True), timings)
    assert numbers_in(first)[:3] == [4, 4096, 32]
    assert numbers_in(first.removesuffix("%"))[-4:] == [96, 96, 72, 25]
    assert second == "    product 4096x14336: SplitKPlan(block_n=128, block_k=128, split=8, stages=4, warps=4)"
