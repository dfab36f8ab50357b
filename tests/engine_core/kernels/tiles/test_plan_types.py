"""Tiles of a W8A8 GEMM and the workspace of their split sums."""

import pytest

from tandem.engine_core.kernels.tiles.plan_types import W8A8GemmPlan


@pytest.mark.parametrize(
    ("rows", "outputs", "tiles"), [(1, 1, 1), (16, 64, 1), (17, 64, 2), (16, 65, 2), (100, 200, 28)]
)
def test_tiles_cover_rows_and_outputs(rows: int, outputs: int, tiles: int) -> None:
    plan = W8A8GemmPlan(block_m=16, block_n=64, split=3, stages=2, warps=4)
    assert plan.tiles(rows, outputs) == tiles
    assert plan.workspace(rows, outputs) == (tiles * 3 * 16 * 64, tiles)


def test_a_gemm_without_splits_needs_no_workspace() -> None:
    assert W8A8GemmPlan(block_m=16, block_n=64, split=1, stages=2, warps=4).workspace(100, 200) == (0, 0)
