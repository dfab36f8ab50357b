"""Plans are ones the kernels accept, for the measured shapes and for any other, and fit the GPU that runs them."""

from dataclasses import replace

import pytest

from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.linear.plans import (
    block_rows,
    bucket,
    choose,
    choose_gated,
    choose_normed,
    workspace_size,
)
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, Plan, SplitKPlan
from tandem.engine_core.kernels.tiles.table import BUCKETS, MatmulKey, TileTable
from tests.fakes.gpus import A100, B200, H20, H200, L4, RTX_4090, RTX_5090, SUPPORTED

OUTPUTS = [16, 64, 576, 2048, 3072, 6144, 16384, 19456, 28672, 128256, 151936]
INPUTS = [64, 128, 576, 1024, 2048, 2560, 4096, 8192, 9728, 14336]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_plans_are_ones_that_the_kernels_accept(outputs: int, inputs: int, itemsize: int) -> None:
    for rows in (1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 500):
        for plan in (
            choose(rows, outputs, inputs, itemsize, H200),
            choose_gated(rows, outputs, inputs, itemsize, H200),
        ):
            if isinstance(plan, GemvPlan):
                assert rows == 1
            elif isinstance(plan, SplitKPlan):
                assert inputs % plan.block_k == 0
                assert 1 <= plan.split <= inputs // plan.block_k


def test_one_row_is_always_a_gemv() -> None:
    for outputs in OUTPUTS:
        for inputs in INPUTS:
            assert isinstance(choose(1, outputs, inputs, 4, H200), GemvPlan)


def test_shapes_that_no_kernel_accepts_are_left_to_the_library() -> None:
    assert choose(1, 64, 50, 2, H200) is None
    assert choose(8, 2048, 2000, 2, H200) is None
    assert choose(8, 2048, 2048, 4, H200) is None
    assert choose(129, 2048, 8192, 2, H200) is None
    assert choose_gated(129, 8192, 2048, 2, H200) is None
    assert choose_normed(4096, 16384, False, H200) is None


def test_gated_plans_above_64_rows_need_nearly_full_waves() -> None:
    assert choose_gated(65, 8192, 2048, 2, H200) == SplitKPlan(64, 64, 1, 6)
    assert choose_gated(128, 14336, 4096, 2, H200) == SplitKPlan(64, 64, 1, 6)
    assert choose_gated(128, 9728, 2560, 2, H200) is None
    assert choose(128, 4096, 14336, 2, H200) is None


def test_small_weights_are_split_into_one_wave() -> None:
    for outputs, inputs, split in ((3072, 2048, 2), (2048, 8192, 4), (4096, 4096, 2), (6144, 4096, 1), (64, 8192, 8)):
        plan = choose(16, outputs, inputs, 2, H200)
        assert isinstance(plan, SplitKPlan)
        assert plan.split == split


def test_two_to_four_rows_use_a_gemv_only_if_one_was_measured() -> None:
    shape, plan = (6144, 4096), GemvPlan(2, 4096, 4, 8)
    before = choose(4, *shape, 2, H200)
    assert isinstance(before, SplitKPlan)
    measured: dict[MatmulKey, Plan] = {MatmulKey(name, 16, *shape, 4): plan for name in ("product", "normed")}
    gpu = replace(H200, tiles=TileTable("some", measured))
    for rows, expected in ((1, False), (2, True), (3, True), (4, True), (5, False)):
        assert (choose(rows, *shape, 2, gpu) == plan) is expected
        assert (choose_normed(*shape, False, gpu, rows=rows) == plan) is expected
        assert choose_gated(rows, *shape, 2, gpu) == choose_gated(rows, *shape, 2, H200)
        if rows > 1:
            assert choose_normed(*shape, False, H200, rows=rows) is None
            assert choose_normed(*shape, True, gpu, rows=rows) is None
            assert choose(rows, *shape, 4, gpu) is None
    assert choose(4, *shape, 2, H200) == before


@pytest.mark.parametrize("inputs", [64, 2048, 2560, 4096, 8192])
@pytest.mark.parametrize("gated", [False, True])
def test_a_fused_norm_takes_whole_rows(inputs: int, gated: bool) -> None:
    plan = choose_normed(4096, inputs, gated, H200)
    assert plan is not None
    assert plan.block_k >= inputs


@pytest.mark.parametrize(
    ("inputs", "block_k"), [(2048, 2048), (2304, 1024), (2560, 1024), (3072, 1024), (3080, 4096), (3584, 4096)]
)
def test_rows_that_fill_a_block_badly_are_chunked_after_two_norms(inputs: int, block_k: int) -> None:
    for gated in (False, True):
        plan = choose_normed(4096, inputs, gated, H200, norms=2)
        assert plan is not None
        assert plan.block_k == block_k
        for bits, norms in ((16, 1), (8, 1), (8, 2)):
            whole = choose_normed(4096, inputs, gated, H200, bits, norms)
            assert (whole is None) == (bits == 8 and inputs % 16 > 0)
            assert whole is None or whole.block_k >= inputs


@pytest.mark.parametrize(
    ("norms", "gated", "chunked"),
    [(1, True, GemvPlan(2, 1024)), (1, False, GemvPlan(2, 1024, 2)), (2, True, None), (2, False, None)],
)
def test_rows_of_5120_inputs_are_chunked_after_one_norm(norms: int, gated: bool, chunked: GemvPlan | None) -> None:
    for inputs in (4104, 5120):
        plan = choose_normed(25600, inputs, gated, H200, norms=norms)
        assert plan == chunked if chunked else plan is not None and plan.block_k == 8192
    for inputs in (4096, 5128):
        plan = choose_normed(25600, inputs, gated, H200, norms=norms)
        assert plan is not None and plan.block_k >= inputs


@pytest.mark.parametrize("width", [16904, 17920, 18944, 25344])
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_gated_programs_run_at_once_if_three_fit_on_a_multiprocessor(rows: int, width: int) -> None:
    plan = choose_gated(rows, width, 5120, 2, H200)
    assert isinstance(plan, SplitKPlan)
    # Each program takes 1 KiB more.
    programs = H200.shared_memory // (plan.stages * stage_bytes(plan, rows, True) + 1024)
    assert programs * H200.multiprocessors >= -(-width // plan.block_n) * plan.split


def test_64_rows_do_not_leave_many_multiprocessors_idle() -> None:
    assert choose(64, 5120, 17408, 2, H200) == SplitKPlan(64, 128, 3, 3)
    assert choose(32, 5120, 17408, 2, H200) == SplitKPlan(64, 128, 1, 5)
    assert choose(64, 4096, 14336, 2, H200) == SplitKPlan(64, 128, 2, 4)


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


def stages(plan: Plan) -> int:
    assert isinstance(plan, SplitKPlan)
    return plan.stages


def stage_bytes(plan: SplitKPlan, rows: int, gated: bool) -> int:
    """Return the bytes loaded by one pipeline stage in bfloat16."""
    return (plan.block_n * (2 if gated else 1) + block_rows(rows)) * plan.block_k * 2


@pytest.mark.parametrize("gpu", SUPPORTED, ids=lambda gpu: gpu.name)
def test_plans_fit_the_shared_memory_of_every_gpu(gpu: GpuTraits) -> None:
    """Before sm_90 and on sm_120 the stage in use is in registers; in between it needs a buffer, too."""
    for outputs in OUTPUTS:
        for inputs in INPUTS:
            for rows in (2, 16, 17, 32, 33, 64, 65, 128):
                plans = choose(rows, outputs, inputs, 2, gpu), choose_gated(rows, outputs, inputs, 2, gpu)
                for gated, plan in enumerate(plans):
                    if isinstance(plan, SplitKPlan):
                        buffers = plan.stages - (gpu.capability[0] in (8, 12))
                        size = BUCKETS[[rows <= most for most in BUCKETS].index(True)]
                        assert buffers * stage_bytes(plan, size, bool(gated)) < gpu.shared_memory
                        assert plan.stages >= 3


def test_an_h200_keeps_the_measured_number_of_stages() -> None:
    assert [stages(choose(rows, 3072, 2048, 2, H200)) for rows in (16, 32)] == [6, 5]
    assert [stages(choose_gated(rows, 8192, 2048, 2, H200)) for rows in (16, 64, 128)] == [4, 6, 6]
    assert choose(128, 2048, 8192, 2, H200) == SplitKPlan(64, 64, 4, 6, 8)


def test_gpus_with_less_shared_memory_get_fewer_stages() -> None:
    assert [stages(choose(16, 3072, 2048, 2, gpu)) for gpu in (A100, L4, RTX_4090, RTX_5090)] == [6, 5, 5, 5]
    assert [stages(choose_gated(128, width, 2048, 2, gpu)) for width, gpu in ((6400, A100), (8192, RTX_4090))] == [6, 4]
    assert stages(choose_gated(16, 8192, 2048, 2, RTX_5090)) == 3


def test_splits_follow_the_number_of_multiprocessors() -> None:
    for gpu, split in ((L4, 1), (H20, 1), (A100, 2), (RTX_4090, 2), (H200, 2), (B200, 3), (RTX_5090, 3)):
        plan = choose(16, 3072, 2048, 2, gpu)
        assert isinstance(plan, SplitKPlan)
        assert plan.split == split, gpu.name
