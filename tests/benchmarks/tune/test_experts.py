"""Tuning of experts over a made-up clock."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.tune.experts import Plans, candidates, improve, tune
from benchmarks.tune.shapes import model_folder
from tandem.engine_core.kernels.moe.plans import GEMV_TOKENS, choose_expert_plan, multiplies_pairs
from tandem.engine_core.kernels.tiles.plan_types import NARROW_BLOCK, ExpertPlan, GemvPlan, GroupedPlan
from tandem.engine_core.kernels.tiles.table import EXPERT_BUCKETS, ExpertKey, ExpertPart, TileTable
from tandem.engine_core.kernels.tiles.table_file import expert_problem, read_table, write_table
from tandem.engine_core.models.registry import read_config
from tests.fakes.gpus import H200, SUPPORTED

PARTS: tuple[ExpertPart, ...] = ("gate_up", "down")


def key_of(part: ExpertPart, tokens: int, weight_bits: int = 16, x_bits: int = 16) -> ExpertKey:
    return ExpertKey(part, weight_bits, x_bits, 2048, 768, 128, 8, tokens)


@pytest.mark.parametrize("bits", [(16, 16), (8, 16), (8, 8), (4, 16)])
@pytest.mark.parametrize("tokens", EXPERT_BUCKETS)
def test_rules_and_candidates_are_plans_that_the_kernels_accept(tokens: int, bits: tuple[int, int]) -> None:
    for part in PARTS:
        key = key_of(part, tokens, *bits)
        assert len(list(candidates(key, tokens <= GEMV_TOKENS))) >= 2
        for gpu in SUPPORTED:
            rule = choose_expert_plan(key, replace(gpu, tiles=TileTable()))
            assert expert_problem(key, rule) == ""
            assert isinstance(rule, GemvPlan if tokens <= 4 else GroupedPlan)


def test_only_int4_experts_have_narrow_blocks() -> None:
    plan = GroupedPlan(NARROW_BLOCK, 64, 128, 3, 4)
    assert expert_problem(key_of("gate_up", 8, 4), plan) == ""
    assert plan in list(candidates(key_of("gate_up", 8, 4), False))
    assert "from 16 on" in expert_problem(key_of("gate_up", 8, 8), plan)
    assert "from 8 on" in expert_problem(key_of("gate_up", 8, 4), replace(plan, block_m=4))


def test_a_measured_plan_serves_all_token_counts_up_to_its_bucket() -> None:
    plan = GroupedPlan(32, 64, 128, 2, 4)
    gpu = replace(H200, tiles=TileTable(H200.name, experts={key_of("down", 64): plan}))
    assert [choose_expert_plan(key_of("down", tokens), gpu) == plan for tokens in (32, 33, 64, 65)] == [
        False,
        True,
        True,
        False,
    ]
    assert choose_expert_plan(key_of("gate_up", 64), gpu) != plan


def test_plans_are_written_and_read(tmp_path: Path) -> None:
    plans: Plans = {
        key_of("gate_up", 1): GemvPlan(4, 2048, 1, 4),
        key_of("down", 64, 8, 8): GroupedPlan(16, 128, 128, 3, 4),
    }
    path = tmp_path / "table.json"
    write_table(path, TileTable("GPU", experts=plans), {})
    assert read_table(path).experts == plans
    path.write_text(path.read_text().replace('"block_n": 128', '"block_n": 96'))
    with pytest.raises(ValueError, match="powers of two"):
        read_table(path)


def test_only_a_plan_that_is_faster_each_time_replaces_the_current_one() -> None:
    key = key_of("gate_up", 64)
    first, second, *_ = candidates(key, False)
    unsteady = iter([0.5, 1.0, 2.0, 1.0] * 9)

    def seconds(plan: ExpertPlan) -> float:
        return 1.0 if plan == first else next(unsteady) if plan == second else 3.0

    assert improve(key, first, seconds) == first
    assert improve(key, first, lambda plan: 0.5 if plan == second else 1.0) == second


def test_a_model_is_tuned_one_matmul_after_the_other() -> None:
    model = read_config(model_folder("qwen3-30b-a3b"))
    calls = []

    def timer(tokens: int, plans: Plans) -> float:
        calls.append(tokens)
        return sum(plan.warps / 1e5 for plan in plans.values())

    found = tune(model, 16, (1, 64), replace(H200, tiles=TileTable()), timer)
    assert set(found) == {key_of(part, tokens) for tokens in (1, 64) for part in PARTS}
    assert all(plan.warps == 4 for plan in found.values()) and set(calls) == {1, 64}


def test_a_shared_expert_of_the_same_width_counts_in_the_keys() -> None:
    model = read_config(model_folder("qwen3.6-35b-a3b"))
    found = tune(model, 8, (1, 8), replace(H200, tiles=TileTable()), lambda *_: 1.0)
    assert {(key.experts, key.top_k) for key in found} == {(257, 9)}


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("pairs_are_faster", [True, False])
def test_gemvs_of_pairs_are_tried_beyond_a_few_tokens(bits: int, pairs_are_faster: bool) -> None:
    model = read_config(model_folder("qwen3-30b-a3b"))

    def timer(tokens: int, plans: Plans) -> float:
        pairs = multiplies_pairs(key_of("down", tokens, bits), replace(H200, tiles=TileTable(experts=plans)))
        return 2.0 - (pairs == pairs_are_faster) + sum(plan.warps / 1e5 for plan in plans.values())

    found = tune(model, bits, (8, 64), replace(H200, tiles=TileTable()), timer)
    gpu = replace(H200, tiles=TileTable(experts=found))
    assert multiplies_pairs(key_of("down", 8, bits), gpu) == pairs_are_faster
    assert not multiplies_pairs(key_of("down", 64, bits), gpu)
