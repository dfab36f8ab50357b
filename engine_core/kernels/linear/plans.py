"""Choice of the matmul kernel by weight shape and number of rows.

The GPU's tile table (`kernels.tiles`) has measured plans; the rules here are for all other shapes and GPUs. They
reproduce the plans that were best or nearly so on an H200 for bf16 weights of Llama-3.2-1B, Llama-3.1-8B and Qwen3-4B.
None means the library (cuBLAS). On other GPUs the rules scale with the number of SMs, and pipeline stages are limited
to what fits.
"""

from dataclasses import replace

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, Plan, SplitKPlan
from tandem.engine_core.kernels.tiles.table import BUCKETS, FEW_ROWS, MatmulKey, Operation

TILE = 64
"""Weight rows per tensor core tile."""
MAX_SPLIT = 8
CHUNK = 1024
"""Elements of a row loaded by four warps at once, 16 bytes per thread."""
MAX_NORM = 8192
"""Maximum number of inputs of a fused norm, which one program holds."""


_EXCLUSIVE_STAGES = {16: 6, 32: 5, 64: 4}
"""Pipeline stages by bucket that use more than half of an H200 SM's shared memory.

A kernel that is launched early finds the previous one's programs still running. If two of its own fit on an SM, they
crowd onto the SMs that empty first and leave others idle: the matmuls of a step then took up to 15 % longer in sequence
than one by one.
"""


def bucket(rows: int) -> int | None:
    """Return the smallest bucket that holds a number of rows, None past the last."""
    return next((size for size in BUCKETS if rows <= size), None)


def choose(rows: int, outputs: int, inputs: int, itemsize: int, gpu: GpuTraits) -> Plan:
    """Choose the plan of y = x W^T.

    rows: of x; outputs, inputs: of W; itemsize: bytes of an element of both.
    """
    size = bucket(rows)
    if not _has_kernel(size, inputs, itemsize) or size is None:
        return None
    few = _few_rows_gemv("product", rows, outputs, inputs, itemsize, gpu)
    if few is not None:
        return few
    rule = _rule(size, outputs, inputs, gpu.multiprocessors)
    return _fitted(_planned("product", size, outputs, inputs, rule, gpu), rows, itemsize, gpu, False)


def choose_gated(rows: int, width: int, inputs: int, itemsize: int, gpu: GpuTraits) -> Plan:
    """Choose the plan of activation(x G^T) * (x U^T) in one kernel.

    width: number of outputs. Measured with SiLU. None means a matmul followed by `gated_activation`.
    """
    size = bucket(rows)
    if not _has_kernel(size, inputs, itemsize) or size is None:
        return None
    rule = _gated_rule(size, width, inputs, gpu.multiprocessors)
    return _fitted(_planned("gated", size, width, inputs, rule, gpu), rows, itemsize, gpu, True)


def choose_normed(
    outputs: int, inputs: int, gated: bool, gpu: GpuTraits, bits: int = 16, norms: int = 1, rows: int = 1
) -> GemvPlan | None:
    """Choose the plan of a matmul fused with the norm before it.

    outputs: of the matmul, half the weight's rows if gated; gated: fuse the activation too; bits: of a weight; norms: 2
    if x is also normalized before the residual addition; rows: of x, of 16 bits if there are several. None means
    separate kernels.
    """
    if rows > 1:
        return _few_rows_gemv("normed_gated" if gated else "normed", rows, outputs, inputs, 2, gpu)
    pieced = _rmsnorm_rule(inputs, gated, norms) if bits == 16 else None
    rule = pieced or normed_rule(inputs, gated, bits)
    if rule is None:
        return None
    operation: Operation = "normed_gated" if gated else "normed"
    found = gpu.tiles.matmul(MatmulKey(operation, bits, outputs, inputs, 1), rule)
    return found if isinstance(found, GemvPlan) else rule


def _has_kernel(size: int | None, inputs: int, itemsize: int) -> bool:
    return size is not None and inputs % 8 == 0 and (size == 1 or (itemsize == 2 and inputs % 128 == 0))


def _planned(operation: Operation, size: int, outputs: int, inputs: int, rule: Plan, gpu: GpuTraits) -> Plan:
    return gpu.tiles.matmul(MatmulKey(operation, 16, outputs, inputs, size), rule)


def _few_rows_gemv(
    operation: Operation, rows: int, outputs: int, inputs: int, itemsize: int, gpu: GpuTraits
) -> GemvPlan | None:
    """Return the measured GEMV of 2 to 4 rows, None without one and for other numbers of rows.

    A rule would not do: whether it is faster than a split-K GEMM depends on the instructions per byte of the GPU.
    """
    if not 1 < rows <= FEW_ROWS or itemsize != 2:
        return None
    found = gpu.tiles.matmul(MatmulKey(operation, 16, outputs, inputs, FEW_ROWS), None)
    return found if isinstance(found, GemvPlan) else None


def _fitted(plan: Plan, rows: int, itemsize: int, gpu: GpuTraits, gated: bool) -> Plan:
    """Limit the pipeline stages of a plan to what fits in shared memory."""
    size = bucket(rows)
    if not isinstance(plan, SplitKPlan) or size is None:
        return plan
    weight_rows = plan.block_n * (2 if gated else 1)
    most = gpu.max_stages((weight_rows + size) * plan.block_k * itemsize, warpgroup=True)
    return plan if plan.stages <= most else replace(plan, stages=most)


def _rule(size: int, outputs: int, inputs: int, multiprocessors: int) -> Plan:
    if size == 1:
        # Within 16 % of the best everywhere. The longer steps were the best of the two measured shapes above 8192.
        return GemvPlan(2, 1024 if inputs <= 8192 else 2048)
    tiles = ceil_div(outputs, TILE)
    if size > 64:
        return None
    if size > 32 and tiles < 256 and inputs < 8192:
        return None
    split = split_inputs(tiles, inputs, multiprocessors)
    if size > 32 and tiles * split < 0.7 * multiprocessors:
        # x takes as many loads as the weights, more than so few SMs do in the time that memory takes for the weights.
        # Two programs an SM; based on sizes instead of timings.
        return SplitKPlan(TILE, 128, split_inputs(tiles, inputs, 2 * multiprocessors), 3)
    stages = _EXCLUSIVE_STAGES[size] if tiles <= multiprocessors else 3 if size > 32 else 4
    return SplitKPlan(TILE, 128, split, stages)


def _gated_rule(size: int, width: int, inputs: int, multiprocessors: int) -> Plan:
    if size == 1:
        return normed_rule(inputs, True)
    tiles = ceil_div(width, TILE)
    split, exclusive = split_inputs(tiles, inputs, multiprocessors), tiles <= multiprocessors
    if size <= 64 and 2 * multiprocessors < tiles <= 3 * multiprocessors:
        # With the stages below two programs fit on an SM of an H200, and the others would follow alone; with these all
        # run at once. A step of 8 rows of Qwen3.5-27B took 0.43 ms less, though a layer alone took 13 us more.
        return SplitKPlan(TILE, 64, split, 4 if size <= 16 else 3)
    if size <= 16:
        return SplitKPlan(TILE, 128, split, 4 if exclusive else 3)
    if size > 64:
        # One program fills an SM, and a second wave must be nearly full to be worthwhile.
        waves = ceil_div(tiles, multiprocessors)
        return SplitKPlan(TILE, 64, split, 6) if tiles > 0.8 * waves * multiprocessors else None
    return SplitKPlan(TILE, 64, split, 6 if exclusive else 4)


def normed_rule(inputs: int, gated: bool, bits: int = 16) -> GemvPlan | None:
    """Return the default plan of a GEMV with a fused norm.

    The weights have 16 or 8 bits. With 8 a program has twice the rows, and so the same bytes for each norm that it
    computes.
    """
    if inputs % (8 if bits == 16 else 16) or inputs > MAX_NORM:
        return None
    rule = _wide_rule(inputs, gated)
    return rule if bits == 16 else replace(rule, tiles=2 * rule.tiles)


def _wide_rule(inputs: int, gated: bool) -> GemvPlan:
    whole = 1 << (inputs - 1).bit_length()
    if whole <= 2048:
        return GemvPlan(2, whole, 2) if gated else GemvPlan(8, whole)
    if whole <= 4096:
        return GemvPlan(4, whole) if gated else GemvPlan(4, whole, 2, 8)
    return GemvPlan(2, whole, 1, 8)


def _rmsnorm_rule(inputs: int, gated: bool, norms: int) -> GemvPlan | None:
    """Return a plan that holds rows in chunks, None if it saves nothing.

    Based on register counts instead of timings, but for 5120 inputs. After two norms of 2560 inputs three programs of a
    gated GEMV fit on an SM instead of two, four of a plain one instead of two of twice the warps. After one norm the
    same number fits. Of 5120 inputs, a row fills 5 of 8 parts of a program that holds it whole: in chunks, an H200 read
    248,320 rows in 551 us instead of 681, 14,336 in 34.7 us instead of 43.8.
    """
    if inputs % 8:
        return None
    if norms == 2 and 2 * CHUNK < inputs <= 3 * CHUNK:
        return GemvPlan(4, CHUNK) if gated else GemvPlan(4, CHUNK, 2)
    if norms == 1 and 4 * CHUNK < inputs <= 5 * CHUNK:
        return GemvPlan(2, CHUNK) if gated else GemvPlan(2, CHUNK, 2)
    return None


def block_rows(rows: int) -> int:
    """Return the padded row count of x in a split-K GEMM, at least 16.

    Fewer rows would not use Hopper's instruction.
    """
    return max(16, 1 << (rows - 1).bit_length())


def workspace_size(rows: int, outputs: int, plan: SplitKPlan, gated: bool = False) -> tuple[int, int]:
    """Return the number of floats and of counters that a split-K GEMM needs.

    outputs: columns of y.
    """
    if plan.split == 1:
        return 0, 0
    tiles = ceil_div(outputs, plan.block_n)
    return tiles * plan.split * plan.block_n * block_rows(rows) * (2 if gated else 1), tiles


def split_inputs(tiles: int, inputs: int, multiprocessors: int) -> int:
    """Return the number of splits of K.

    It yields about as many programs as SMs, never more.
    """
    return max(1, min(multiprocessors // tiles, MAX_SPLIT, inputs // 128))
