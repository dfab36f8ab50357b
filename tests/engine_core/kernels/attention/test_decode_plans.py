"""Choice of splits and of fused RoPE in a decode step, by shape and number of rows."""

from dataclasses import replace

import pytest
import torch

from tandem.engine_core.kernels.attention.decode_plans import choose_fused_rope_plan, choose_plan
from tandem.engine_core.kernels.tiles.plan_types import DecodePlan, Tile
from tandem.engine_core.kernels.tiles.table import DecodeKey, TileTable
from tests.fakes.gpus import A100, H200


@pytest.mark.parametrize(
    ("pairs", "early"), [(8, None), (63, None), (64, True), (511, True), (512, False), (1023, False), (1024, True)]
)
def test_attention_rotates_heads_of_64_where_rows_are_several(pairs: int, early: bool | None) -> None:
    found = choose_fused_rope_plan(64, pairs, torch.bfloat16, H200)
    usual = choose_plan(64, pairs, torch.bfloat16, torch.bfloat16, H200)
    assert found == (None if early is None else usual._replace(early=early))


def test_others_are_rotated_by_a_kernel_before() -> None:
    for head_dim, dtype in ((128, torch.bfloat16), (64, torch.float32), (64, torch.float8_e4m3fn)):
        assert choose_fused_rope_plan(head_dim, 256, dtype, H200) is None


def test_a_gpu_without_dependent_launch_loads_nothing_early() -> None:
    found = choose_fused_rope_plan(64, 256, torch.bfloat16, A100)
    assert found is not None and not found.early


def test_a_measured_plan_sets_early_loads() -> None:
    plan = DecodePlan(Tile(64, 4, 2), 512, early=True)
    gpu = replace(H200, tiles=TileTable("a", {}, {DecodeKey(64, 16, 512): plan}))
    assert choose_fused_rope_plan(64, 600, torch.bfloat16, gpu) == plan


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "pairs", "least"),
    [
        (128, torch.bfloat16, 31, 64),
        (128, torch.bfloat16, 32, 128),
        (128, torch.bfloat16, 255, 128),
        (128, torch.bfloat16, 256, 1024),
        (128, torch.float8_e4m3fn, 64, 64),
        (64, torch.bfloat16, 64, 64),
    ],
)
def test_positions_of_a_split_grow_with_pairs(head_dim: int, kv_dtype: torch.dtype, pairs: int, least: int) -> None:
    gpu = replace(H200, tiles=TileTable())
    assert choose_plan(head_dim, pairs, torch.bfloat16, kv_dtype, gpu).least == least
