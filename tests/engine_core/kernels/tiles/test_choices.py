"""Kernels use a device's table where it has an entry, and the rules otherwise."""

import json
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch

from tandem.engine_core.kernels.attention.decode_plans import choose_plan, choose_splits, choose_tile
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.linear.plans import choose, choose_gated, choose_normed
from tandem.engine_core.kernels.linear.quantized_plans import (
    choose_eight_bit,
    choose_eight_bit_gated,
    choose_int4,
    choose_int4_gated,
    choose_int4_normed,
)
from tandem.engine_core.kernels.tiles.plan_types import DecodePlan, GemvPlan, Plan, SplitKPlan, Tile
from tandem.engine_core.kernels.tiles.table import BUCKETS, NO_TABLE, DecodeKey, MatmulKey, Operation, TileTable
from tests.fakes.gpus import A100, H200, L4

Chooser = Callable[[int, int, int, GpuTraits], Plan]
CHOOSERS: dict[str, Chooser] = {
    "product": lambda rows, outputs, inputs, gpu: choose(rows, outputs, inputs, 2, gpu),
    "gated": lambda rows, outputs, inputs, gpu: choose_gated(rows, outputs, inputs, 2, gpu),
    "product of bytes": choose_eight_bit,
    "gated of bytes": choose_eight_bit_gated,
    "product of int4": lambda rows, outputs, inputs, gpu: choose_int4(rows, outputs, inputs, 128, gpu),
    "gated of int4": lambda rows, outputs, inputs, gpu: choose_int4_gated(rows, outputs, inputs, 128, gpu),
}
BITS = {"product": 16, "gated": 16, "bytes": 8, "int4": 4}
EXPECTED: dict[str, list[list[int] | None]] = json.loads((Path(__file__).parent / "h200_plans.json").read_text())
"""Plans of an H200 by the rules, for each of `BUCKETS`: the fields of a plan, or null for the library."""


@pytest.mark.parametrize("name", EXPECTED)
def test_an_h200_has_measured_plans_and_rules_for_the_rest(name: str) -> None:
    """The plans of 16 bits are those from before there were tables."""
    kind, _, shape = name.rpartition(" ")
    outputs, inputs = map(int, shape.split("x"))
    found = [CHOOSERS[kind](rows, outputs, inputs, H200) for rows in BUCKETS]
    operation: Operation = "gated" if kind.startswith("gated") else "product"
    bits = BITS[kind.rpartition(" ")[2]]
    for rows, plan, expected in zip(BUCKETS, found, EXPECTED[name], strict=True):
        key = MatmulKey(operation, bits, outputs, inputs, rows)
        if key in H200.tiles.products:
            assert plan == H200.tiles.products[key]
        else:
            assert fields_of(plan) == expected, rows


def fields_of(plan: Plan) -> list[int] | None:
    """The fields of a plan."""
    return None if plan is None else list(astuple(plan))


def with_table(gpu: GpuTraits, key: MatmulKey, plan: Plan) -> GpuTraits:
    return replace(gpu, tiles=TileTable(gpu.name, {key: plan}))


@pytest.mark.parametrize("kind", CHOOSERS)
def test_every_matmul_takes_a_plan_of_the_table(kind: str) -> None:
    operation: Operation = "gated" if kind.startswith("gated") else "product"
    bits = BITS[kind.rpartition(" ")[2]]
    for rows, bucket in ((1, 1), (2, 16), (16, 16), (17, 32), (64, 64)):
        plan: Plan = GemvPlan(2, 2048, 1, 8) if bucket == 1 else SplitKPlan(128, 64, 5, 2, 8)
        key = MatmulKey(operation, bits, 3072, 2048, bucket)
        gpu = with_table(H200, key, plan)
        assert CHOOSERS[kind](rows, 3072, 2048, gpu) == plan
        assert CHOOSERS[kind](rows, 3088, 2048, gpu) == CHOOSERS[kind](rows, 3088, 2048, replace(H200, tiles=NO_TABLE))


def test_a_table_may_prefer_the_library() -> None:
    gpu = with_table(H200, MatmulKey("product", 16, 3072, 2048, 16), None)
    assert choose(9, 3072, 2048, 2, gpu) is None
    assert choose(9, 3072, 2048, 2, H200) is not None


@pytest.mark.parametrize("gated", [False, True])
def test_a_fused_norm_takes_a_plan_of_the_table(gated: bool) -> None:
    operation: Operation = "normed_gated" if gated else "normed"
    for bits in (16, 8, 4):
        plan = GemvPlan(1, 2048, 1, 2)
        gpu = with_table(H200, MatmulKey(operation, bits, 3072, 2048, 1), plan)

        def chosen(outputs: int, gated: bool, bits: int = bits, gpu: GpuTraits = gpu) -> Plan:
            if bits == 4:
                return choose_int4_normed(outputs, 2048, 128, gated, gpu)
            return choose_normed(outputs, 2048, gated, gpu, bits)

        assert chosen(3072, gated) == plan
        assert chosen(3072, not gated) != plan
        assert chosen(6144, gated) != plan


def test_measured_stages_are_cut_to_the_shared_memory() -> None:
    """A file copied to a smaller GPU must not fail at the first launch."""
    plan = SplitKPlan(128, 128, 1, 6)
    for gpu, stages in ((H200, 6), (L4, 3)):
        found = choose(16, 3072, 2048, 2, with_table(gpu, MatmulKey("product", 16, 3072, 2048, 16), plan))
        assert isinstance(found, SplitKPlan)
        assert found.stages == stages


def test_scales_and_zero_points_of_a_stage_count_too() -> None:
    """Four stages of these took 167,680 bytes by Triton's assembler, of which an A100 has 166,912."""
    plan, key = SplitKPlan(128, 128, 2, 4), MatmulKey("gated", 4, 14336, 4096, 64)
    found = [choose_int4_gated(64, 14336, 4096, 128, with_table(gpu, key, plan)) for gpu in (A100, H200)]
    assert [found_plan.stages for found_plan in found if isinstance(found_plan, SplitKPlan)] == [3, 4]


def test_small_int4_groups_do_not_use_a_plan_of_large_blocks() -> None:
    gpu = with_table(H200, MatmulKey("product", 4, 3072, 2048, 16), SplitKPlan(64, 128, 3))
    large, small = (choose_int4(16, 3072, 2048, group, gpu) for group in (128, 32))
    assert large == SplitKPlan(64, 128, 3)
    assert isinstance(small, SplitKPlan)
    assert small.block_k == 32


def test_decode_takes_a_plan_of_the_table_for_its_range_of_pairs() -> None:
    plan = DecodePlan(Tile(32, 2, 4), 256, 3)
    gpu = replace(H200, tiles=TileTable(H200.name, {}, {DecodeKey(64, 16, 512): plan}))
    half = torch.bfloat16
    assert [choose_plan(64, pairs, half, half, gpu) == plan for pairs in (511, 512, 1023, 1024)] == [
        False,
        True,
        True,
        False,
    ]
    assert choose_plan(64, 512, half, torch.float8_e4m3fn, gpu) != plan
    assert choose_plan(128, 512, half, half, gpu) != plan
    assert choose_plan(64, 512, torch.float32, torch.float32, gpu).tile == Tile(16, 4, 1)


@pytest.mark.parametrize(("pairs", "least"), [(8, 64), (255, 64), (256, 1024), (2048, 1024)])
def test_decode_follows_the_rule_without_an_entry(pairs: int, least: int) -> None:
    half, bare = torch.bfloat16, replace(H200, tiles=NO_TABLE)
    assert choose_plan(64, pairs, half, half, bare) == DecodePlan(choose_tile(64, pairs, half, half), least, 1)


def test_a_measured_number_of_splits_is_a_lower_bound() -> None:
    assert [choose_splits(64, 8, 132, 8192, fewest) for fewest in (1, 2, 4)] == [1, 2, 4]
    assert choose_splits(1, 8, 132, 8192, 2) == choose_splits(1, 8, 132, 8192)
    assert choose_splits(64, 8, 132, 32, 4) == 1
