"""Plans are ones the kernels accept, for the measured shapes and for any other."""

import pytest

from tandem.engine_core.kernels.linear.plans import (
    BUCKETS,
    GemvPlan,
    SplitKPlan,
    block_rows,
    bucket,
    choose,
    choose_gated,
    choose_normed,
    workspace_size,
)

OUTPUTS = [16, 64, 576, 2048, 3072, 6144, 16384, 19456, 28672, 128256, 151936]
INPUTS = [64, 128, 576, 1024, 2048, 2560, 4096, 8192, 9728, 14336]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_plans_are_ones_that_the_kernels_accept(outputs: int, inputs: int, itemsize: int) -> None:
    for rows in (1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 500):
        for plan in (choose(rows, outputs, inputs, itemsize), choose_gated(rows, outputs, inputs, itemsize)):
            if isinstance(plan, GemvPlan):
                assert rows == 1
            elif isinstance(plan, SplitKPlan):
                assert inputs % plan.block_k == 0
                assert 1 <= plan.split <= inputs // plan.block_k


def test_one_row_is_always_a_gemv() -> None:
    for outputs in OUTPUTS:
        for inputs in INPUTS:
            assert isinstance(choose(1, outputs, inputs, 4), GemvPlan)


def test_shapes_that_no_kernel_accepts_are_left_to_the_library() -> None:
    assert choose(1, 64, 50, 2) is None
    assert choose(8, 2048, 2000, 2) is None
    assert choose(8, 2048, 2048, 4) is None
    assert choose(129, 2048, 8192, 2) is None
    assert choose_gated(129, 8192, 2048, 2) is None
    assert choose_normed(16384, False) is None


def test_gated_plans_above_64_rows_need_nearly_full_waves() -> None:
    assert choose_gated(65, 8192, 2048, 2) == SplitKPlan(64, 64, 1, 6)
    assert choose_gated(128, 14336, 4096, 2) == SplitKPlan(64, 64, 1, 6)
    assert choose_gated(128, 9728, 2560, 2) is None
    assert choose(128, 4096, 14336, 2) is None


def test_small_weights_are_split_into_one_wave() -> None:
    for outputs, inputs, split in ((3072, 2048, 2), (2048, 8192, 4), (4096, 4096, 2), (6144, 4096, 1), (64, 8192, 8)):
        plan = choose(16, outputs, inputs, 2)
        assert isinstance(plan, SplitKPlan)
        assert plan.split == split


@pytest.mark.parametrize("inputs", [64, 2048, 2560, 4096, 8192])
@pytest.mark.parametrize("gated", [False, True])
def test_a_fused_norm_takes_whole_rows(inputs: int, gated: bool) -> None:
    plan = choose_normed(inputs, gated)
    assert plan is not None
    assert plan.block_k >= inputs


def test_workspace_grows_with_rows_up_to_the_bucket() -> None:
    assert [bucket(rows) for rows in (1, 2, 8, 9, 33, 64, 65, 129)] == [1, 16, 16, 16, 64, 64, 128, None]
    assert [block_rows(rows) for rows in (2, 16, 17, 64)] == [16, 16, 32, 64]
    plan = SplitKPlan(64, 128, 4)
    assert workspace_size(8, 2048, plan) == (32 * 4 * 64 * 16, 32)
    assert workspace_size(8, 2048, plan, True) == (2 * 32 * 4 * 64 * 16, 32)
    assert workspace_size(8, 2048, SplitKPlan(64, 128, 1)) == (0, 0)
    for rows in range(1, BUCKETS[-1] + 1):
        size = bucket(rows)
        assert size is not None
        assert workspace_size(rows, 2048, plan) <= workspace_size(size, 2048, plan)
