"""Choice of the kernel for a matmul with quantized weights, by shape and number of rows.

The GPU's tile table has measured plans; the rules here are derived from those of 16-bit weights, at half or a quarter
of the bytes. None means a library matmul.
"""

from dataclasses import replace

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.gpu_traits import FP8_CAPABILITY, GpuTraits
from tandem.engine_core.kernels.linear.int4_layout import run_length
from tandem.engine_core.kernels.linear.plans import (
    MAX_NORM,
    TILE,
    bucket,
    normed_rule,
    split_inputs,
)
from tandem.engine_core.kernels.quantized_activation import quantizes_in_tiles
from tandem.engine_core.kernels.tiles.plan_types import (
    INT4_STRIDE,
    GemvPlan,
    Plan,
    SplitKPlan,
    W8A8GemmPlan,
)
from tandem.engine_core.kernels.tiles.table import (
    W8A8_BUCKETS,
    EightBitKind,
    MatmulKey,
    Operation,
    Scaling,
    W8A8GemmKey,
)

MAX_ROWS = 64
"""Maximum rows for matmuls that dequantize weights on the fly and keep activations in 16 bits."""
SCALE_ROWS, SCALE_COLUMNS = 16, 128
"""Shape of a block with its own scale: few rows, so that blocks end where parts of a fused projection do."""
_BLOCK_K = 128
_INPUT_BYTES = 2
MAX_STAGES = 4
"""Pipeline stages if shared memory allows: two programs fit on an H200 SM."""
MAX_W8A16_ROWS = 1
"""Maximum rows for which activations are not quantized.

At 16 and 32 rows FP8 weights that were dequantized in registers took 0.84 and 1.0 times the matmuls of 16 bits on an
H200, and W8A8 GEMMs 0.6 at 33 rows.
"""
MIN_SPLIT_INPUTS = 512
"""Minimum inputs per split."""
_MAX_PROGRAMS_PER_SM = 4
"""Maximum concurrent programs per SM for int4 weights, limited by registers.

On sm_90 a thread uses up to 122 at 32 rows. At 64 rows, where it uses 168, shared memory limits an SM to two programs.
With 8 splits, which fill 512 of 528 program slots of an H200, a layer with 32 rows of 14,336 inputs and 4,096 outputs
took a quarter less time than with 4 splits, as it did with tiles of 128 outputs and 8 splits, which fill the same
number of slots.
"""
LONG_PART = 1536
"""Minimum inputs per split for which more splits were faster, rounded down from 1,792."""
LONG_INPUTS = 8192
"""Minimum inputs for which two programs share a narrow tile when one wave of tiles is full."""
LIBRARY_BLOCK_INPUTS = 512
"""Required divisor of the inputs of library matmuls with block scales: rows of scales are aligned to 16 bytes."""
_BLOCK_M, _SMALL_M = 128, 64
MAX_SPLITK_ROWS = 32
"""Maximum rows of `w8a8_splitk`, the W8A8 GEMM with the weights as the left operand."""
STEP_INPUTS = 2048
"""Inputs per step of a GEMV program, if it does not hold whole rows."""
_MIN_SM_UTILIZATION = 0.7
"""Minimum fraction of SMs, over all waves, that tiles without split-K must keep busy."""
_EXCLUSIVE_BYTES, _PAIRED_BYTES = 122880, 98304
"""Pipeline bytes with which exactly one program fits on an H200 SM (see `plans._EXCLUSIVE_STAGES`), and with which two
do."""


def quantizes_activations(rows: int, kind: EightBitKind, gpu: GpuTraits) -> bool:
    """Return whether a matmul of a number of rows takes quantized activations.

    Only if the checkpoint expects it. Otherwise weights are dequantized in the matmul, or before it if the GPU lacks
    FP8 matmuls.
    """
    return rows > MAX_W8A16_ROWS and (kind == "int8" or gpu.capability >= FP8_CAPABILITY)


def uses_library_matmul(
    rows: int, outputs: int, inputs: int, kind: EightBitKind, scaling: Scaling, gpu: GpuTraits
) -> bool:
    """Return whether a W8A8 matmul uses the library instead of `w8a8_matmul`.

    The rule was measured on one H200 with the shapes of Llama-3.1-8B.
    """
    if kind == "int8":
        # The library returns int32 sums, which would need two more kernels to be scaled.
        return False
    if scaling == "block" and (gpu.capability[0] != 9 or inputs % LIBRARY_BLOCK_INPUTS):
        # The library supports block scales only on Hopper.
        return False
    key = _w8a8_key(rows, outputs, inputs, kind, scaling)
    if key is not None and key in gpu.tiles.byte_products:
        return gpu.tiles.byte_products[key] is None
    if inputs % _BLOCK_K:
        return True
    # Up to here small-M tiles, then one wave of narrow ones, were faster than the library.
    return rows > _SMALL_M and (scaling == "tensor" or rows > 128 or not _one_wave(rows, outputs, gpu))


def choose_w8a8_gemm(
    rows: int, outputs: int, inputs: int, kind: EightBitKind, scaling: Scaling, gpu: GpuTraits
) -> W8A8GemmPlan | None:
    """Choose the plan of `w8a8_matmul`, None if it does not support the number of inputs."""
    if inputs % _BLOCK_K:
        return None
    key = _w8a8_key(rows, outputs, inputs, kind, scaling)
    measured = None if key is None else gpu.tiles.byte_products.get(key)
    if measured is not None and fits_w8a8_workspace(measured, rows, outputs, gpu):
        return measured
    return _w8a8_rule(rows, outputs, inputs, scaling, gpu)


def _w8a8_key(
    rows: int, outputs: int, inputs: int, kind: EightBitKind, scaling: Scaling, gated: bool = False
) -> W8A8GemmKey | None:
    size = next((size for size in W8A8_BUCKETS if rows <= size), None)
    return None if size is None else W8A8GemmKey(kind, scaling, outputs, inputs, size, gated)


def _w8a8_rule(rows: int, outputs: int, inputs: int, scaling: Scaling, gpu: GpuTraits) -> W8A8GemmPlan:
    if rows <= _SMALL_M:
        return _small_m_rule(rows, outputs, inputs, scaling, gpu)
    narrow = _one_wave(rows, outputs, gpu)
    block_n, stages = (64, 5 if rows <= 128 else 4) if narrow else (128, 3)
    stages = min(stages, gpu.max_stages((_BLOCK_M + block_n) * _BLOCK_K, warpgroup=True))
    plan = W8A8GemmPlan(_BLOCK_M, block_n, 1, stages, 4 if narrow else 8)
    split = split_inputs(plan.tiles(rows, outputs), inputs, gpu.multiprocessors)
    if narrow and split == 1 and inputs >= LONG_INPUTS:
        # Two programs fit on an SM.
        split = 2
    return replace(plan, split=split)


def _small_m_rule(rows: int, outputs: int, inputs: int, scaling: Scaling, gpu: GpuTraits) -> W8A8GemmPlan:
    block_m = next(size for size in (16, MAX_SPLITK_ROWS, _SMALL_M) if rows <= size)
    exclusive = ceil_div(outputs, TILE) <= gpu.multiprocessors
    # Two blocks of outputs halve the repeated reads of 64 rows of inputs.
    block_n = TILE if exclusive or block_m < _SMALL_M else 2 * TILE
    # Same bytes per step as with 16-bit weights; block scales limit the step to 128 inputs.
    block_k = 2 * _BLOCK_K if block_m < _SMALL_M and scaling != "block" and inputs % (2 * _BLOCK_K) == 0 else _BLOCK_K
    stage_bytes = (block_m + block_n) * block_k
    stages = ceil_div(_EXCLUSIVE_BYTES, stage_bytes) if exclusive else _PAIRED_BYTES // stage_bytes
    # Block scales are loaded with each step.
    stages = min(stages, gpu.max_stages(stage_bytes + 4 * (block_m + block_n), warpgroup=True))
    plan = W8A8GemmPlan(block_m, block_n, 1, stages, 4, block_k)
    split = split_inputs(plan.tiles(rows, outputs), inputs, gpu.multiprocessors)
    return replace(plan, split=min(split, inputs // block_k))


def choose_gated_w8a8_gemm(
    rows: int, width: int, inputs: int, kind: EightBitKind, scaling: Scaling, group: int, gpu: GpuTraits
) -> W8A8GemmPlan | None:
    """Choose the plan of `gated_w8a8_gemm`, None for separate kernels.

    width: number of outputs; group: outputs that share a scale, less than 1 for static or row scales.
    """
    if not MAX_W8A16_ROWS < rows <= _SMALL_M or inputs % _BLOCK_K:
        return None
    key = _w8a8_key(rows, width, inputs, kind, scaling, gated=True)
    rule = _gated_rule(rows, width, group, gpu)
    measured = rule if key is None else gpu.tiles.byte_products.get(key, rule)
    # Measured with the default group size of each weight format.
    return measured if measured is None or quantizes_in_tiles(group, measured.block_n) else rule


def _gated_rule(rows: int, width: int, group: int, gpu: GpuTraits) -> W8A8GemmPlan | None:
    """Return the plan of a gated matmul whose tiles keep most SMs busy.

    Measured on one H200 with the shapes of Llama-3.1-8B at 16 and 64 rows, where a step took about 2 % less.
    """
    block_m = next(size for size in (16, MAX_SPLITK_ROWS, _SMALL_M) if rows <= size)
    block_n = 2 * TILE if group > 0 or block_m == _SMALL_M else TILE
    tiles = ceil_div(width, block_n)
    waves = ceil_div(tiles, gpu.multiprocessors)
    if not quantizes_in_tiles(group, block_n) or tiles < _MIN_SM_UTILIZATION * waves * gpu.multiprocessors:
        return None
    # Block scales are loaded with each step.
    stage_bytes = (block_m + 2 * block_n) * _BLOCK_K + 4 * (block_m + 2)
    stages = min(MAX_STAGES, gpu.max_stages(stage_bytes, warpgroup=True))
    return W8A8GemmPlan(block_m, block_n, 1, stages, 8 if block_n > TILE and block_m > 16 else 4)


def fits_w8a8_workspace(plan: W8A8GemmPlan, rows: int, outputs: int, gpu: GpuTraits) -> bool:
    """Return whether the partial sums of a measured plan fit in the workspace."""
    floats, counters = plan.workspace(rows, outputs)
    most_floats, most_counters = w8a8_workspace(gpu)
    return floats <= most_floats and counters <= most_counters


def _one_wave(rows: int, outputs: int, gpu: GpuTraits) -> bool:
    """Return whether all tiles of 64 outputs run in one wave."""
    return ceil_div(rows, _BLOCK_M) * ceil_div(outputs, 64) <= gpu.multiprocessors


def w8a8_workspace(gpu: GpuTraits) -> tuple[int, int]:
    """Return the numbers of floats and counters that are enough for every plan.

    Tiles are split only while all of them, or twice as many narrow ones, run in one wave.
    """
    return gpu.multiprocessors * 128 * 128, gpu.multiprocessors


def choose_eight_bit(rows: int, outputs: int, inputs: int, gpu: GpuTraits, group: int = SCALE_COLUMNS) -> Plan:
    """Choose the plan of y = x W^T with an 8-bit W and 16-bit x.

    group: inputs that share a scale.
    """
    if rows == 1 and inputs % 16 == 0:
        rule: Plan = GemvPlan(8, min(STEP_INPUTS, 1 << (inputs - 1).bit_length()))
        return gpu.tiles.matmul(MatmulKey("product", 8, outputs, inputs, 1), rule)
    return _splitk(rows, outputs, inputs, gpu, gated=False, bits=8, group=group)


def choose_eight_bit_gated(rows: int, width: int, inputs: int, gpu: GpuTraits, group: int = SCALE_COLUMNS) -> Plan:
    """Choose the plan of activation(x G^T) * (x U^T) in one kernel.

    width: number of outputs; group: inputs that share a scale.
    """
    if rows == 1 and inputs % 16 == 0:
        return gpu.tiles.matmul(MatmulKey("gated", 8, width, inputs, 1), normed_rule(inputs, True, 8))
    return _splitk(rows, width, inputs, gpu, gated=True, bits=8, group=group)


def choose_int4(rows: int, outputs: int, inputs: int, group: int, gpu: GpuTraits, ordered: bool = False) -> Plan:
    """Choose the plan of y = x W^T with an int4 W.

    group: group size; ordered: act-order, for which the kernel of one row permutes x itself.
    """
    if not run_length(inputs, group):
        return None
    if rows == 1:
        rule = GemvPlan(_height(8, inputs, group), min(STEP_INPUTS, 1 << (inputs - 1).bit_length()))
        if ordered and inputs <= MAX_NORM:
            rule = _whole_row_int4(inputs, group, gated=False)
        return _one_row(MatmulKey("product", 4, outputs, inputs, 1), rule, group, gpu, ordered)
    return _splitk(rows, outputs, inputs, gpu, gated=False, bits=4, group=group)


def choose_int4_gated(rows: int, width: int, inputs: int, group: int, gpu: GpuTraits, ordered: bool = False) -> Plan:
    """Choose the plan of activation(x G^T) * (x U^T) with int4 weights.

    width: number of outputs; group: group size; ordered: as in `choose_int4`.
    """
    if not run_length(inputs, group):
        return None
    if rows == 1 and inputs <= MAX_NORM:
        rule = _whole_row_int4(inputs, group, gated=True, ordered=ordered)
        return _one_row(MatmulKey("gated", 4, width, inputs, 1), rule, group, gpu, ordered)
    return _splitk(rows, width, inputs, gpu, gated=True, bits=4, group=group)


def choose_int4_normed(
    outputs: int, inputs: int, group: int, gated: bool, gpu: GpuTraits, ordered: bool = False
) -> GemvPlan | None:
    """Choose the plan of a one-row int4 matmul fused with the norm before it.

    outputs: as in `choose_normed`; ordered: as in `choose_int4`. None means separate kernels.
    """
    if inputs > MAX_NORM or not run_length(inputs, group):
        return None
    operation: Operation = "normed_gated" if gated else "normed"
    rule = _whole_row_int4(inputs, group, gated=gated, ordered=ordered)
    return _one_row(MatmulKey(operation, 4, outputs, inputs, 1), rule, group, gpu, ordered)


def _one_row(key: MatmulKey, rule: GemvPlan, group: int, gpu: GpuTraits, ordered: bool) -> GemvPlan:
    """Return the measured plan, or the rule's.

    Plans are measured with groups of 128 and without act-order, and not used otherwise.
    """
    found = rule if ordered or _in_short_groups(key.inputs, group) else gpu.tiles.matmul(key, rule)
    return found if isinstance(found, GemvPlan) else rule


def _in_short_groups(inputs: int, group: int) -> bool:
    """Return whether the words of one vector load belong to several groups.

    Each group then has its own scale and zero point.
    """
    return group % (INT4_STRIDE * run_length(inputs, group)) > 0


def _height(rows: int, inputs: int, group: int) -> int:
    """Halve a tile's rows if groups are small and so have many scales.

    More programs then run concurrently. On sm_90 a thread uses 182 registers with eight rows of 4,096 inputs and groups
    of 32 or 64, and 128 with four; with groups of 128 it uses 168 and 96.
    """
    return rows // 2 if _in_short_groups(inputs, group) else rows


def _whole_row_int4(inputs: int, group: int, *, gated: bool, ordered: bool = False) -> GemvPlan:
    """Return the plan of programs that hold whole rows.

    With several tiles each, fewer programs prepare the same inputs. Gated ones have more tiles with act-order: with the
    best plan without it, of twice the programs and half the warps, a step of Llama-3.1-8B with act-order took 2.39 ms
    instead of 2.11. Measured on an H200 with groups of 128.
    """
    whole = 1 << (inputs - 1).bit_length()
    warps = 4 if whole <= 4096 else 8
    tiles = (10 if ordered else 4) if gated else 2
    return GemvPlan(_height(4 if gated else 8, inputs, group), whole, tiles, warps)


def _filling(split: int, tiles: int, inputs: int, size: int, gpu: GpuTraits) -> int:
    """Return the number of splits whose programs fill the GPU in one wave.

    Programs that are launched early crowd onto the SMs that empty first (see `plans._EXCLUSIVE_STAGES`) and leave
    others idle if more program slots are free than needed.
    """
    stage_bytes = _BLOCK_K * (TILE // 2 + max(size, 16) * _INPUT_BYTES)
    programs_per_sm = min(_MAX_PROGRAMS_PER_SM, gpu.shared_memory // (MAX_STAGES * stage_bytes))
    while 2 * split * tiles <= programs_per_sm * gpu.multiprocessors and inputs >= 2 * split * LONG_PART:
        split *= 2
    return split


def _splitk(
    rows: int, outputs: int, inputs: int, gpu: GpuTraits, *, gated: bool, bits: int, group: int = _BLOCK_K
) -> Plan:
    size = bucket(rows)
    block = _BLOCK_K
    if bits == 4:
        # A step must not cross a group.
        block = next(
            part for part in (_BLOCK_K, 64, 32) if group % part == INT4_STRIDE * run_length(inputs, group) % part == 0
        )
    elif group in (32, 64):
        block = group
    if size is None or size > MAX_ROWS or inputs % block:
        return None
    operation: Operation = "gated" if gated else "product"
    # While one program unpacks its weights, another uses the tensor cores. Equal parts need no masks.
    tiles = ceil_div(outputs, TILE)
    split = split_inputs(tiles, inputs, 2 * gpu.multiprocessors)
    split = 1 << (max(1, min(split, inputs // MIN_SPLIT_INPUTS)).bit_length() - 1)
    if bits == 4 and not gated and gpu.pdl:
        split = _filling(split, tiles, inputs, size, gpu)
    rule = SplitKPlan(TILE, block, split, MAX_STAGES)
    plan = gpu.tiles.matmul(MatmulKey(operation, bits, outputs, inputs, size), rule)
    if isinstance(plan, SplitKPlan) and group % plan.block_k:
        # Measured with larger groups.
        plan = rule
    if not isinstance(plan, SplitKPlan):
        return plan
    height = plan.block_n * (2 if gated else 1)
    stage_bytes = (height * bits // 8 + max(size, 16) * _INPUT_BYTES) * plan.block_k
    unpacked = 0
    if bits < 8:
        # A stage has a scale and a zero point per output.
        stage_bytes += 5 * height
        # On some GPUs unpacked weights are converted to the matmul's layout through shared memory.
        unpacked = height * plan.block_k * _INPUT_BYTES
    return replace(plan, stages=min(plan.stages, gpu.max_stages(stage_bytes, unpacked, warpgroup=False)))
