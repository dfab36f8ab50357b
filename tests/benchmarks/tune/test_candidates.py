"""Candidates are plans that the kernels accept and that fit the GPU; what they compute is the product."""

from pathlib import Path

import pytest
import torch

from benchmarks.tune.__main__ import line_of, list_tasks, read_arguments
from benchmarks.tune.byte_products import FORMATS, byte_candidates, byte_chosen
from benchmarks.tune.candidates import chosen, decode_candidates, most_stages, product_candidates, ruled
from benchmarks.tune.compiling import identity, jobs_of
from benchmarks.tune.products import weights_of
from benchmarks.tune.shapes import byte_keys, decode_keys, model_folder, product_keys, read_models
from benchmarks.tune.timings import Choice, Timings
from tandem.engine_core.kernels.attention.paged_decode import choose_plan
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.tiles.plan_types import SplitKPlan
from tandem.engine_core.kernels.tiles.table import BUCKETS, BYTE_BUCKETS, ByteProductKey, DecodeKey, ProductKey
from tandem.engine_core.kernels.tiles.table_file import byte_product_problem, decode_problem, product_problem
from tests.fakes.gpus import H200, L4, RTX_5090

GPUS = (H200, L4, RTX_5090)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("model", ["1b", "8b", "4b", "phi-4-mini"])
def test_candidates_are_accepted_by_the_kernels_and_fit(model: str, gpu: object) -> None:
    for key in product_keys(read_models([model])[0], BUCKETS, (16, 8, 4)):
        plans = product_candidates(key, gpu)
        assert len(set(plans)) == len(plans) <= 45
        for plan in plans:
            assert product_problem(key, plan) == ""
            assert not isinstance(plan, SplitKPlan) or plan.stages <= most_stages(key, plan, gpu)
        if key.rows <= 64 or key.bits == 16:
            assert plans[0] == chosen(key, gpu)
            assert ruled(key, gpu) in plans
            assert len(plans) > (2 if key.bits == 4 else 3)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_candidates_of_bytes_are_accepted_and_fit(gpu: GpuTraits) -> None:
    for key in byte_keys(read_models(["8b"])[0], BYTE_BUCKETS, FORMATS):
        plans = byte_candidates(key, gpu)
        assert plans[0] == byte_chosen(key, gpu)
        assert 3 < len(set(plans)) == len(plans) <= 25
        assert not any(byte_product_problem(key, plan) for plan in plans)
        own = [plan for plan in plans if plan is not None]
        stages = [(plan.stages - 1) * (plan.block_m + plan.block_n) * plan.block_k for plan in own]
        assert max(stages) <= gpu.shared_memory
        assert (None in plans) == (key.kind == "fp8" and (key.scaling != "block" or gpu is H200))


def test_the_products_of_a_model_are_those_of_its_step() -> None:
    (model,) = read_models(["1b"])
    assert product_keys(model, [64], [16]) == [
        ProductKey("gated", 16, 8192, 2048, 64),
        ProductKey("product", 16, 2048, 8192, 64),
        ProductKey("product", 16, 3072, 2048, 64),
        ProductKey("product", 16, 2048, 2048, 64),
        ProductKey("product", 16, 128256, 2048, 64),
    ]
    assert {key.operation for key in product_keys(model, [1], [8])} == {"normed", "normed_gated", "product"}
    assert [key.pairs for key in decode_keys(model, [1, 64, 256])] == [8, 512, 2048]
    assert decode_keys(model, [64], [16, 8]) == [DecodeKey(64, 16, 512), DecodeKey(64, 8, 512)]


def test_models_are_named_shortly_by_shape_or_by_folder(tmp_path: Path) -> None:
    assert model_folder("8b").name == "llama-3.1-8b"
    assert model_folder("qwen2.5-7b").name == "qwen2.5-7b"
    assert model_folder(str(tmp_path)) == tmp_path


def test_decode_candidates_begin_with_those_of_today() -> None:
    for key in decode_keys(read_models(["1b"])[0], [8, 64, 256]):
        today = choose_plan(key.head_dim, key.pairs, torch.bfloat16, torch.bfloat16, H200)
        plans = decode_candidates(key, today, today)
        assert plans[0] == today
        assert len(set(plans)) == len(plans) > 10
        assert not any(decode_problem(key, plan) for plan in plans)


def test_each_code_is_compiled_once_and_what_is_used_today_first(tmp_path: Path) -> None:
    tasks = list_tasks(read_arguments(["--model", "1b", "--rows", "64", "1"]), H200)
    timings = Timings(tmp_path / "t.jsonl")
    jobs = jobs_of(tasks, timings)
    assert set(jobs) == {identity(task.key, plan) for task in tasks for plan in task.plans}
    today = {identity(task.key, task.plans[0]) for task in tasks}
    assert set(list(jobs)[: len(today)]) == today
    for task in tasks:
        for plan in task.plans:
            timings.add(task.key, plan, 1.0)
    assert jobs_of(tasks, timings) == {}


def test_a_share_of_the_tasks_can_be_asked_for() -> None:
    names = [
        {type(task.key).__name__ for task in list_tasks(read_arguments(["--model", "1b", *more]), H200)}
        for more in ([], ["--only", "decode"], ["--only", "products"], ["--only", "bytes"], ["--bits", "16", "8"])
    ]
    every = {"ProductKey", "DecodeKey", "ByteProductKey"}
    assert names == [{"ProductKey", "DecodeKey"}, {"DecodeKey"}, {"ProductKey"}, {"ByteProductKey"}, every]


def test_tasks_come_by_their_rows_for_all_models() -> None:
    command = ["--model", "1b", "8b", "--rows", "64", "1", "--byte-rows", "256", "--bits", "16", "8"]
    keys = [task.key for task in list_tasks(read_arguments([*command, "--formats", "blocks"]), H200)]
    ranks = [0 if isinstance(key, DecodeKey) else {64: 1, 256: 2, 1: 3}[key.rows] for key in keys]
    assert ranks == sorted(ranks)
    assert set(ranks) == {0, 1, 2, 3}
    assert {key.inputs for key in keys if isinstance(key, ByteProductKey)} == {2048, 8192, 4096, 14336}
    assert {key.scaling for key in keys if isinstance(key, ByteProductKey)} == {"block"}


def test_a_line_names_key_times_and_plan() -> None:
    (task,) = (one for one in list_tasks(read_arguments(["--model", "1b", "--only", "decode"]), H200)
               if one.key == DecodeKey(64, 16, 512))  # fmt: skip
    line = line_of(Choice(task, task.plans[1], 9.0, 10.0, None))
    assert "decode head_dim 64 KV 16 bits pairs 512" in line
    assert "10.0%" in line
    assert repr(task.plans[1]) in line


def test_enough_weights_are_read_to_leave_the_cache() -> None:
    assert weights_of(ProductKey("product", 16, 2048, 2048, 1)) == 31
    assert weights_of(ProductKey("normed", 16, 128256, 4096, 1)) == 1
    assert weights_of(ProductKey("gated", 4, 8192, 2048, 1)) == 16
