"""Candidates are plans that the kernels accept and that fit the GPU."""

from dataclasses import replace

import pytest
import torch

from benchmarks.tune.candidates import chosen, decode_candidates, matmul_candidates, ruled, splits
from benchmarks.tune.shapes import EIGHT_BIT_FORMATS, FORMATS, decode_keys, layer_key, matmul_keys, read_models
from benchmarks.tune.w8a8_candidates import w8a8_candidates, w8a8_chosen, w8a8_ruled
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.attention.decode_plans import choose_plan
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.tiles.plan_types import DecodePlan, GemvPlan, SplitKPlan, Tile
from tandem.engine_core.kernels.tiles.table import (
    BUCKETS,
    FEW_ROWS,
    W8A8_BUCKETS,
    DecodeKey,
    MatmulKey,
    TileTable,
    W8A8GemmKey,
)
from tandem.engine_core.kernels.tiles.table_file import decode_problem, matmul_problem, w8a8_gemm_problem
from tests.fakes.gpus import H200, L4, RTX_5090

GPUS = (H200, L4, RTX_5090)
DOWN = MatmulKey("product", 4, 4096, 14336, 32)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("model", ["1b", "8b", "4b", "phi-4-mini"])
def test_candidates_are_accepted_by_the_kernels_and_fit(model: str, gpu: GpuTraits) -> None:
    for rows in BUCKETS:
        for name in set(FORMATS) - set(EIGHT_BIT_FORMATS):
            for key in matmul_keys(layer_key(read_models([model])[0], name, rows), gpu).values():
                assert isinstance(key, MatmulKey)
                plans = matmul_candidates(key, gpu)
                assert len(set(plans)) == len(plans) <= 100
                for plan in plans:
                    assert matmul_problem(key, plan) == ""
                    # The weights alone; the engine counts what else a stage holds.
                    if isinstance(plan, SplitKPlan):
                        stage = plan.block_n * plan.block_k * key.bits // 8 * (2 if key.operation == "gated" else 1)
                        assert (plan.stages - 1) * stage <= gpu.shared_memory
                if key.rows <= 64 or key.bits == 16:
                    assert plans[0] == ruled(key, gpu)
                    assert chosen(key, gpu) in plans
                    assert len(plans) > (1 if key.bits == 4 else 3)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("model", ["1b", "8b", "4b"])
def test_candidates_of_few_rows_follow_the_plan_for_sixteen(model: str, gpu: GpuTraits) -> None:
    own, sixteen = (matmul_keys(layer_key(read_models([model])[0], "16 bits", rows), gpu) for rows in (FEW_ROWS, 16))
    assert {name: key.operation for name, key in own.items() if isinstance(key, MatmulKey)} == {
        "gate_up": "normed_gated",
        "qkv": "normed",
        "head": "normed",
        "o": "product",
        "down": "product",
    }
    for name, key in own.items():
        assert isinstance(key, MatmulKey)
        rule, *gemvs = matmul_candidates(key, gpu)
        assert 10 < len(gemvs) < 50
        for plan in gemvs:
            assert matmul_problem(key, plan) == ""
            assert chosen(key, replace(gpu, tiles=TileTable(f"{key}{plan}", {key: plan}))) == plan
        if key.operation == "product":
            other = sixteen[name]
            assert isinstance(other, MatmulKey)
            assert rule == ruled(other, gpu)
        else:
            assert rule is None


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_candidates_of_bytes_are_accepted_and_fit(gpu: GpuTraits) -> None:
    model = read_models(["8b"])[0]
    for rows in W8A8_BUCKETS:
        for name in EIGHT_BIT_FORMATS:
            for key in matmul_keys(layer_key(model, name, rows), gpu).values():
                assert isinstance(key, W8A8GemmKey)
                plans = w8a8_candidates(key, gpu)
                assert plans[0] == w8a8_ruled(key, gpu)
                assert w8a8_chosen(key, gpu) in plans
                assert 2 < len(set(plans)) == len(plans) <= 40
                assert not any(w8a8_gemm_problem(key, plan) for plan in plans)
                own = [plan for plan in plans if plan is not None]
                heights = [plan.block_m + plan.block_n * (1 + key.gated) for plan in own]
                stages = [(plan.stages - 1) * height * plan.block_k for plan, height in zip(own, heights, strict=True)]
                assert max(stages) <= gpu.shared_memory
                has_library = key.kind == "fp8" and (key.scaling != "block" or gpu is H200)
                assert (None in plans) == (key.gated or has_library)


@pytest.mark.parametrize("bits", [8, 4])
def test_one_row_of_quantized_weights_has_plans_of_many_tiles_and_of_steps(bits: int) -> None:
    plans = matmul_candidates(MatmulKey("normed_gated", bits, 14336, 4096, 1), H200)
    assert {(plan.rows, plan.tiles) for plan in plans if isinstance(plan, GemvPlan)} >= {(4, 10), (4, 1), (8, 2)}
    assert all(isinstance(plan, GemvPlan) and plan.block_k == 4096 for plan in plans)
    plans = matmul_candidates(MatmulKey("product", bits, 4096, 14336, 1), H200)
    by_size: dict[int, set[int]] = {}
    for plan in plans:
        assert isinstance(plan, GemvPlan)
        by_size.setdefault(plan.block_k, set()).add(plan.tiles)
    assert by_size[2048] == by_size[4096] == {1}
    assert by_size[16384] >= {1, 2, 4}
    assert {plan.rows for plan in plans if isinstance(plan, GemvPlan)} == ({2, 4, 8, 16} if bits == 4 else {2, 4, 8})
    assert 16 in {plan.warps for plan in plans if isinstance(plan, GemvPlan) and plan.block_k == 16384}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("bits", [8, 4])
def test_programs_for_one_row_of_quantized_weights_may_fill_a_gpu_in_one_wave(bits: int, gpu: GpuTraits) -> None:
    for outputs in (4096, 14336):
        plans = matmul_candidates(MatmulKey("normed", bits, outputs, 4096, 1), gpu)
        found = {ceil_div(outputs, plan.rows * plan.tiles) for plan in plans if isinstance(plan, GemvPlan)}
        for side_by_side in (2, 3, 4, 5, 6):
            slots = side_by_side * gpu.multiprocessors
            assert any(0.6 * slots <= programs <= slots for programs in found), (outputs, side_by_side, sorted(found))


def test_long_inputs_are_divided_into_as_many_parts_as_fit_side_by_side() -> None:
    plans = matmul_candidates(DOWN, H200)
    assert {plan.split for plan in plans if isinstance(plan, SplitKPlan) and plan.block_n == 64} == {2, 4, 8}
    assert {plan.split for plan in plans if isinstance(plan, SplitKPlan) and plan.block_n == 128} == {4, 8}
    for rows in (16, 32, 64):
        bytes_ = w8a8_candidates(W8A8GemmKey("fp8", "block", 4096, 14336, rows), H200)
        assert {plan.split for plan in bytes_ if plan is not None and plan.block_n == 64} == {2, 4, 8}


@pytest.mark.parametrize("multiprocessors", [20, 58, 84, 132, 170])
@pytest.mark.parametrize("tiles", [8, 32, 64, 224, 2004])
def test_parts_leave_few_multiprocessors_idle_and_make_few_waves(tiles: int, multiprocessors: int) -> None:
    gpu = GpuTraits("some", (9, 0), multiprocessors, 1 << 17)
    found = splits(tiles, 14336, gpu)
    assert found == sorted(set(found))
    assert all(14336 / split >= 512 for split in found)
    for split in found:
        within = multiprocessors // 2 <= tiles * split <= 4 * multiprocessors
        assert within or split == max(1, min(multiprocessors // tiles, 8))


def test_decode_candidates_begin_with_those_of_today() -> None:
    for key in decode_keys(read_models(["1b"])[0], [8, 64, 256]):
        today = choose_plan(key.head_dim, key.pairs, torch.bfloat16, torch.bfloat16, H200)
        plans = decode_candidates(key, today, today, H200)
        assert plans[0] == today
        assert len(set(plans)) == len(plans) > 10
        assert not any(decode_problem(key, plan) for plan in plans)
        assert not any(plan.early for plan in decode_candidates(key, today, today, L4))


@pytest.mark.parametrize(
    ("width", "bits", "held"),
    [(64, 8, {(64, 4, 2), (32, 1, 3), (32, 4, 3)}), (128, 16, {(64, 4, 2), (32, 4, 3)}), (128, 8, {(32, 4, 3)})],
)
def test_early_loads_are_tried_where_registers_hold_them(width: int, bits: int, held: set[tuple[int, ...]]) -> None:
    rule = DecodePlan(Tile(64, 4, 4), 1024)
    plans = decode_candidates(DecodeKey(width, bits, 512), rule, rule, H200)
    assert {plan.tile for plan in plans if plan.early} & {(64, 4, 2), (32, 1, 3), (32, 4, 3)} == held
