"""Plans of matmuls with quantized weights."""

from dataclasses import replace

import pytest

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.linear.plans import bucket, choose_normed
from tandem.engine_core.kernels.linear.quantized_plans import (
    MAX_ROWS,
    MAX_W8A16_ROWS,
    SCALE_COLUMNS,
    SCALE_ROWS,
    choose_eight_bit,
    choose_eight_bit_gated,
    choose_gated_w8a8_gemm,
    choose_int4,
    choose_int4_gated,
    choose_int4_normed,
    choose_w8a8_gemm,
    quantizes_activations,
    uses_library_matmul,
    w8a8_workspace,
)
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, SplitKPlan, W8A8GemmPlan
from tandem.engine_core.kernels.tiles.table import (
    NO_TABLE,
    EightBitKind,
    MatmulKey,
    Operation,
    Scaling,
    TileTable,
    W8A8GemmKey,
)
from tandem.engine_core.kernels.tiles.table_file import matmul_problem
from tests.fakes.gpus import A100, B200, H20, H200, L4, RTX_3090, RTX_5090

SHAPES = ((3072, 2048), (16384, 2048), (2048, 8192), (6144, 4096), (28672, 4096), (4096, 14336), (256, 128))


@pytest.mark.parametrize("gpu", [A100, RTX_3090, L4, H200, B200, RTX_5090], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("gated", [False, True])
def test_every_plan_fits_the_gpu_and_stays_within_blocks_of_scales(gpu: object, gated: bool) -> None:
    for outputs, inputs in SHAPES:
        for rows in (1, 2, 16, 17, 33, 64):
            choose = choose_eight_bit_gated if gated else choose_eight_bit
            plan = choose(rows, outputs // 2 if gated else outputs, inputs, gpu)
            if isinstance(plan, GemvPlan):
                assert rows == 1
                assert SCALE_ROWS % plan.rows == 0
                assert plan.block_k >= inputs or not gated
            elif rows > 1:
                assert isinstance(plan, SplitKPlan)
                assert SCALE_COLUMNS % plan.block_k == inputs % plan.block_k == 0
                assert plan.split * plan.block_k <= inputs
                stage = plan.block_k * (plan.block_n * (1 + gated) + 2 * (bucket(rows) or 0))
                assert (plan.stages - 1) * stage <= gpu.shared_memory
            else:
                assert gated and inputs > 8192, "only a norm's width bounds a fused gate"


def test_more_rows_and_indivisible_inputs_have_none() -> None:
    assert choose_eight_bit(MAX_ROWS + 1, 4096, 4096, H200) is None
    assert choose_eight_bit(8, 4096, 4096 + 64, H200) is None
    assert choose_eight_bit(1, 4096, 4096 + 8, H200) is None


GPUS = [A100, RTX_3090, L4, H200, B200, RTX_5090]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_w8a8_plan_fits_the_gpu_and_the_workspace(gpu: GpuTraits) -> None:
    floats, counters = w8a8_workspace(gpu)
    for outputs, inputs in SHAPES:
        for rows in (2, 16, 17, 32, 33, 64, 65, 128, 129, 256, 1000, 8192):
            plan = choose_w8a8_gemm(rows, outputs, inputs, "fp8", "output", gpu)
            assert plan is not None
            assert 128 % plan.block_n == 0
            assert plan.split * plan.block_k <= inputs
            own = plan.workspace(rows, outputs)
            assert own[0] <= floats
            assert own[1] <= counters
            assert (plan.stages - 1) * (plan.block_m + plan.block_n) * plan.block_k <= gpu.shared_memory
    assert choose_w8a8_gemm(65, 4096, 4096 + 64, "fp8", "output", gpu) is None


def test_inputs_are_quantized_for_many_rows_on_gpus_with_8_bit_matmuls() -> None:
    assert [quantizes_activations(rows, "fp8", L4) for rows in (1, MAX_W8A16_ROWS, MAX_W8A16_ROWS + 1)] == [
        False,
        False,
        True,
    ]
    assert not quantizes_activations(1000, "fp8", A100)
    assert quantizes_activations(1000, "int8", A100)


def test_the_library_multiplies_blocks_on_hopper_alone_and_never_integers() -> None:
    blocks = [gpu.name for gpu in GPUS if uses_library_matmul(4096, 4096, 4096, "fp8", "block", gpu)]
    assert blocks == [H200.name]
    assert not uses_library_matmul(4096, 4096, 4096 + 128, "fp8", "block", H200)
    assert all(uses_library_matmul(300, 4096, 4096, "fp8", scaling, L4) for scaling in ("tensor", "output"))
    assert not uses_library_matmul(300, 4096, 4096, "int8", "output", H200)


def test_a_measured_plan_comes_before_the_rules_where_the_workspace_holds_it() -> None:
    plan = W8A8GemmPlan(64, 64, 1, 6, 4)
    large = replace(plan, split=64)
    measured = {
        W8A8GemmKey("fp8", "output", 6144, 4096, 128): plan,
        W8A8GemmKey("fp8", "tensor", 6144, 4096, 128): plan,
        W8A8GemmKey("fp8", "output", 6144, 4096, 256): None,
        W8A8GemmKey("fp8", "output", 28672, 4096, 128): large,
        W8A8GemmKey("int8", "output", 6144, 4096, 8192): plan,
    }
    gpu = replace(H200, tiles=TileTable(H200.name, byte_products=measured))
    bare = replace(H200, tiles=NO_TABLE)
    for rows in (65, 100, 128):
        assert choose_w8a8_gemm(rows, 6144, 4096, "fp8", "output", gpu) == plan
        assert not uses_library_matmul(rows, 6144, 4096, "fp8", "tensor", gpu)
        assert uses_library_matmul(rows, 6144, 4096, "fp8", "tensor", bare)
    assert choose_w8a8_gemm(8192, 6144, 4096, "int8", "output", gpu) == plan
    assert uses_library_matmul(256, 6144, 4096, "fp8", "output", gpu)
    others: list[tuple[int, int, Scaling]] = [
        (64, 6144, "output"),
        (129, 6144, "output"),
        (128, 28672, "output"),
        (128, 6144, "block"),
    ]
    for rows, outputs, scaling in others:
        by_rule = choose_w8a8_gemm(rows, outputs, 4096, "fp8", scaling, bare)
        assert choose_w8a8_gemm(rows, outputs, 4096, "fp8", scaling, gpu) == by_rule
    assert choose_w8a8_gemm(8193, 6144, 4096, "int8", "output", gpu) == choose_w8a8_gemm(
        8193, 6144, 4096, "int8", "output", bare
    )


def test_one_wave_of_narrow_tiles_is_ours_but_for_scales_of_whole_tensors() -> None:
    for scaling in ("output", "block"):
        assert not uses_library_matmul(128, 6144, 4096, "fp8", scaling, H200)
        assert uses_library_matmul(128, 28672, 4096, "fp8", scaling, H200)
        assert uses_library_matmul(129, 4096, 4096, "fp8", scaling, H200)
        assert not uses_library_matmul(64, 28672, 4096, "fp8", scaling, H200)
    assert uses_library_matmul(128, 6144, 4096, "fp8", "tensor", H200)
    assert not uses_library_matmul(64, 6144, 4096, "fp8", "tensor", H200)
    assert uses_library_matmul(16, 6144, 4096 + 64, "fp8", "tensor", H200), "ours divide inputs by 128"


def gated_format(group: int) -> tuple[EightBitKind, Scaling, int]:
    """The weight format of a layer whose gates are quantized in groups."""
    return ("int8", "output", 0) if group == 0 else ("fp8", "tensor" if group < 0 else "block", group)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_gated_w8a8_plans_fit_the_gpu_and_keep_it_busy(gpu: GpuTraits) -> None:
    planned = 0
    for width in (1024, 3072, 8192, 9728, 12288, 14336, 28672):
        for group in (-1, 0, 128):
            for rows in (2, 16, 17, 32, 33, 64):
                plan = choose_gated_w8a8_gemm(rows, width, 4096, *gated_format(group), gpu)
                if plan is None:
                    continue
                planned += 1
                assert rows <= plan.block_m <= 64
                assert group in (-1, 0, plan.block_n)
                stage = (plan.block_m + 2 * plan.block_n) * plan.block_k
                assert (plan.stages - 1) * stage <= gpu.shared_memory
                tiles = ceil_div(width, plan.block_n)
                assert tiles >= 0.7 * ceil_div(tiles, gpu.multiprocessors) * gpu.multiprocessors
    assert planned > 20


def test_gate_and_quantization_are_separate_for_one_row_many_rows_and_small_networks() -> None:
    bare = replace(H200, tiles=NO_TABLE)
    assert choose_gated_w8a8_gemm(64, 14336, 4096, *gated_format(128), bare) == W8A8GemmPlan(64, 128, 1, 4, 8)
    assert choose_gated_w8a8_gemm(16, 14336, 4096, *gated_format(-1), bare) == W8A8GemmPlan(16, 64, 1, 4, 4)
    assert choose_gated_w8a8_gemm(16, 14336, 4096, *gated_format(128), bare) == W8A8GemmPlan(16, 128, 1, 4, 4)
    for rows, width, inputs, group in (
        (1, 14336, 4096, -1),
        (65, 14336, 4096, -1),
        (64, 3072, 1024, -1),
        (64, 14336, 4096 + 64, -1),
        (64, 14336, 4096, 64),
        (64, 8192, 2048, 128),
    ):
        assert choose_gated_w8a8_gemm(rows, width, inputs, *gated_format(group), bare) is None


def test_a_measured_plan_of_a_gated_gemm_is_used_for_groups_of_its_tiles() -> None:
    plan = W8A8GemmPlan(64, 64, 1, 6, 4)
    measured = {
        W8A8GemmKey("fp8", "tensor", 14336, 4096, 64, gated=True): plan,
        W8A8GemmKey("int8", "output", 14336, 4096, 16, gated=True): None,
        W8A8GemmKey("fp8", "output", 14336, 4096, 64): None,
    }
    bare = replace(H200, tiles=NO_TABLE)
    gpu = replace(H200, tiles=TileTable(H200.name, byte_products=measured))
    for rows in (33, 64):
        for group, expected in ((-1, plan), (0, plan), (64, plan), (128, W8A8GemmPlan(64, 128, 1, 4, 8))):
            assert choose_gated_w8a8_gemm(rows, 14336, 4096, "fp8", "tensor", group, gpu) == expected
    assert choose_gated_w8a8_gemm(16, 14336, 4096, "int8", "output", 0, gpu) is None
    assert choose_gated_w8a8_gemm(65, 14336, 4096, "fp8", "tensor", -1, gpu) is None
    others: list[tuple[int, int, EightBitKind, Scaling]] = [
        (32, 14336, "fp8", "tensor"),
        (17, 14336, "int8", "output"),
        (64, 12288, "fp8", "tensor"),
        (64, 14336, "fp8", "output"),
    ]
    for rows, width, kind, scaling in others:
        by_rule = choose_gated_w8a8_gemm(rows, width, 4096, kind, scaling, 0, bare)
        assert choose_gated_w8a8_gemm(rows, width, 4096, kind, scaling, 0, gpu) == by_rule is not None


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_int4_plans_fit_the_gpu_and_the_groups(gpu: GpuTraits) -> None:
    for outputs, inputs in (*SHAPES, (320, 160)):
        for group in (inputs, 128, 32):
            for rows in (1, 2, 16, 17, 33, 64):
                for gated in (False, True):
                    choose = choose_int4_gated if gated else choose_int4
                    plan = choose(rows, outputs // (1 + gated), inputs, group, gpu)
                    if group > inputs or inputs % group:
                        continue
                    if isinstance(plan, GemvPlan):
                        assert rows == 1
                        assert plan.block_k >= inputs or not gated
                        assert plan.block_k % 128 == 0
                    else:
                        assert isinstance(plan, SplitKPlan)
                        assert group % plan.block_k == inputs % plan.block_k == plan.block_k % 32 == 0
                        weights = plan.block_n * (1 + gated)
                        stage = plan.block_k * (weights // 2 + 2 * max(16, bucket(rows) or 0))
                        assert (plan.stages - 1) * stage + weights * plan.block_k * 2 <= gpu.shared_memory


def test_groups_that_no_kernel_takes_have_no_plan() -> None:
    for inputs, group in ((4096, 16), (4072, 4072)):
        assert choose_int4(1, 4096, inputs, group, H200) is None
        assert choose_int4_gated(8, 4096, inputs, group, H200) is None
        assert choose_int4_normed(4096, inputs, group, False, H200) is None


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("group", [32, 64])
def test_tiles_of_short_groups_have_half_the_rows_whatever_was_measured(group: int, gated: bool) -> None:
    for gpu in (H200, A100):
        plans = [
            choose_int4_normed(14336, 4096, group, gated, gpu),
            (choose_int4_gated if gated else choose_int4)(1, 4096, 4096, group, gpu),
        ]
        assert [plan.rows for plan in plans if isinstance(plan, GemvPlan)] == [2 if gated else 4] * 2
    assert choose_int4_normed(14336, 4096, 4096, gated, A100) == choose_int4_normed(14336, 4096, 128, gated, A100)


@pytest.mark.parametrize("group", [32, 128])
def test_one_row_with_an_order_keeps_the_rules_plans_whatever_was_measured(group: int) -> None:
    measured = GemvPlan(2, 4096, 20, 2)
    keys = [MatmulKey(kind, 4, 4096, 4096, 1) for kind in ("normed", "normed_gated", "product", "gated")]  # type: ignore[arg-type]
    gpu = replace(H200, tiles=TileTable(H200.name, dict.fromkeys(keys, measured)))
    rows = 2 if group == 32 else 4
    for given in (gpu, replace(gpu, tiles=NO_TABLE)):
        for gated, plan in ((False, GemvPlan(2 * rows, 4096, 2)), (True, GemvPlan(rows, 4096, 10))):
            assert choose_int4_normed(4096, 4096, group, gated, given, ordered=True) == plan
            choose = choose_int4_gated if gated else choose_int4
            assert choose(1, 4096, 4096, group, given, ordered=True) == plan
            assert choose(16, 4096, 4096, group, given, ordered=True) == choose(16, 4096, 4096, group, given)
    assert choose_int4_normed(4096, 4096, 128, True, gpu) == choose_int4(1, 4096, 4096, 128, gpu) == measured
    # A matmul of more inputs than a program holds processes them in steps, whatever was measured.
    key = MatmulKey("product", 4, 4096, 28672, 1)
    gpu = replace(H200, tiles=TileTable(H200.name, {key: GemvPlan(4, 32768, 4, 16)}))
    assert choose_int4(1, 4096, 28672, group, gpu, ordered=True) == GemvPlan(2 * rows, 2048)


def test_every_chosen_plan_of_one_row_is_one_that_tables_may_hold() -> None:
    for inputs in (8, 16, 24, 32, 40, 64, 72, 96, 128, 160, 2560, 4096, 8192, 14336, 28672):
        for gated in (False, True):
            operation: Operation = "normed_gated" if gated else "normed"
            usual: Operation = "gated" if gated else "product"
            found = [
                (operation, 8, choose_normed(48, inputs, gated, A100, 8)),
                (usual, 8, (choose_eight_bit_gated if gated else choose_eight_bit)(1, 48, inputs, A100)),
                (operation, 4, choose_int4_normed(48, inputs, 32, gated, A100)),
                (usual, 4, (choose_int4_gated if gated else choose_int4)(1, 48, inputs, 32, A100)),
            ]
            for kind, bits, plan in found:
                if isinstance(plan, GemvPlan):
                    assert matmul_problem(MatmulKey(kind, bits, 48, inputs, 1), plan) == "", (inputs, kind, bits)


def test_a_norm_is_fused_with_a_one_row_int4_matmul_up_to_its_maximum_size() -> None:
    for outputs, gated in ((8192, True), (14336, True), (14336, False)):
        assert choose_int4_normed(outputs, 4096, 128, gated, H200) is not None
        assert choose_int4_normed(outputs, 16384, 128, gated, H200) is None
    assert isinstance(choose_int4_gated(1, 14336, 4096, 128, H200), GemvPlan)
    assert isinstance(choose_int4_gated(1, 14336, 16384, 128, H200), SplitKPlan)


@pytest.mark.parametrize("gpu", [A100, L4, H20, H200, B200, RTX_5090], ids=lambda gpu: gpu.name)
def test_splits_of_long_inputs_fill_a_gpu_with_pdl(gpu: GpuTraits) -> None:
    """By the rule there are never more programs than run concurrently, and a split is never short."""
    gpu = replace(gpu, tiles=NO_TABLE)
    for outputs, inputs in (*SHAPES, (8192, 28672), (3584, 18944)):
        for rows in (16, 32, 64):
            plan = choose_int4(rows, outputs, inputs, 128, gpu)
            assert isinstance(plan, SplitKPlan)
            tiles = outputs // plan.block_n
            # Weights and inputs of a step.
            stage = plan.block_k * (plan.block_n // 2 + 2 * rows)
            places = min(4, gpu.shared_memory // (4 * stage)) * gpu.multiprocessors
            could_be_more = 2 * tiles * plan.split <= places and inputs // (2 * plan.split) >= 1536
            assert not (could_be_more and gpu.pdl)
            assert plan.split == 1 or tiles * plan.split <= max(places, 2 * gpu.multiprocessors)


def test_the_down_projection_of_an_8b_is_split_to_fill_the_gpu() -> None:
    """64 tiles: an H200 holds four programs on each of 132 SMs, and two at 64 rows."""
    splits = {
        gpu.name: [choose_int4(rows, 4096, 14336, 128, gpu).split for rows in (2, 16, 32, 33, 64)]  # type: ignore[union-attr]
        for gpu in (H200, L4, RTX_5090)
    }
    assert splits == {H200.name: [8, 8, 8, 4, 4], L4.name: [1] * 5, RTX_5090.name: [4] * 5}
