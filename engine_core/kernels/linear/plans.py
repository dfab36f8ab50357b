"""Kernels for each weight shape and number of rows, as measured on one H200.

The measurements are over bf16 weights of Llama-3.2-1B, Llama-3.1-8B and Qwen3-4B. The rules hold the plans that were
best or nearly so there, the tables the exceptions. None stands for the library (cuBLAS). On other GPUs the rules
count with their multiprocessors, and every plan has as many pipeline stages, up to the measured number, as fit.
"""

from dataclasses import dataclass, replace

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.gpu_traits import GpuTraits

TILE = 64
"""Number of weight rows in a tensor core tile."""
BUCKETS = (1, 16, 32, 64, 128)
"""Row counts for which plans are chosen; a plan serves every number of rows up to its bucket."""
MAX_SPLIT = 8
MAX_NORM = 8192
"""Largest number of inputs that one program can hold for a fused norm."""


@dataclass(frozen=True, slots=True)
class GemvPlan:
    """Launch parameters of a matrix-vector product.

    Each program makes `rows` x `tiles` outputs, `block_k` inputs at a time.
    """

    rows: int
    block_k: int
    tiles: int = 1
    warps: int = 4


@dataclass(frozen=True, slots=True)
class SplitKPlan:
    """Launch parameters of a split-K product.

    Its tiles are `block_n` weight rows by `block_k` columns, and `split` programs share K.
    """

    block_n: int
    block_k: int
    split: int
    stages: int = 4
    warps: int = 4


Plan = GemvPlan | SplitKPlan | None

_GEMV = {
    (3072, 2048): GemvPlan(4, 1024),
    (2048, 2048): GemvPlan(4, 1024),
    (16384, 2048): GemvPlan(4, 1024),
    (2048, 8192): GemvPlan(4, 1024),
    (128256, 2048): GemvPlan(4, 1024),
    (6144, 4096): GemvPlan(4, 2048, warps=8),
    (4096, 4096): GemvPlan(4, 2048, warps=8),
    (28672, 4096): GemvPlan(4, 2048, warps=8),
    (4096, 14336): GemvPlan(2, 2048),
    (128256, 4096): GemvPlan(2, 1024),
    (6144, 2560): GemvPlan(2, 2048),
    (2560, 4096): GemvPlan(4, 1024),
    (19456, 2560): GemvPlan(2, 2048),
    (2560, 9728): GemvPlan(2, 2048),
    (151936, 2560): GemvPlan(2, 2048),
}
_GEMM: dict[tuple[int, int], dict[int, Plan]] = {
    (19456, 2560): {16: SplitKPlan(128, 64, 1), 64: None},
    (6144, 2560): {64: SplitKPlan(64, 128, 1)},
    (2048, 8192): {128: SplitKPlan(64, 64, 4, 6, 8)},
}
_LONE_STAGES = {16: 6, 32: 5, 64: 4}
"""Pipeline stages by bucket that take more than half of an H200 multiprocessor's shared memory.

A kernel launched early finds the previous one's programs still there. Where two of its own fit side by side, they crowd
onto the multiprocessors that empty first and leave others idle: the products of a step then took up to 15 % longer
together than one by one.
"""


def bucket(rows: int) -> int | None:
    """Return the smallest bucket that holds a number of rows, None past the last."""
    return next((size for size in BUCKETS if rows <= size), None)


def choose(rows: int, outputs: int, inputs: int, itemsize: int, gpu: GpuTraits) -> Plan:
    """Choose the plan of y = x W^T.

    rows: of x; outputs, inputs: of W; itemsize: bytes of an element of both.
    """
    return _fitted(_measured(rows, outputs, inputs, itemsize, gpu.multiprocessors), rows, itemsize, gpu, False)


def choose_gated(rows: int, width: int, inputs: int, itemsize: int, gpu: GpuTraits) -> Plan:
    """Choose the plan of activation(x G^T) * (x U^T) in one kernel.

    width: number of outputs. Measured with SiLU. None stands for a product followed by `gated_activation`.
    """
    return _fitted(_measured_gated(rows, width, inputs, itemsize, gpu.multiprocessors), rows, itemsize, gpu, True)


def _fitted(plan: Plan, rows: int, itemsize: int, gpu: GpuTraits, gated: bool) -> Plan:
    """Return a plan with no more pipeline stages than fit the shared memory."""
    size = bucket(rows)
    if not isinstance(plan, SplitKPlan) or size is None:
        return plan
    weight_rows = plan.block_n * (2 if gated else 1)
    most = gpu.max_stages((weight_rows + size) * plan.block_k * itemsize, warpgroup=True)
    return plan if plan.stages <= most else replace(plan, stages=most)


def _measured(rows: int, outputs: int, inputs: int, itemsize: int, multiprocessors: int) -> Plan:
    size = bucket(rows)
    if size is None or inputs % 8:
        return None
    if size == 1:
        # The rule's plan was within 16 % of the best everywhere.
        return _GEMV.get((outputs, inputs), GemvPlan(2, 1024))
    if itemsize != 2 or inputs % 128:
        return None
    exceptions = _GEMM.get((outputs, inputs), {})
    if size in exceptions:
        return exceptions[size]
    tiles = ceil_div(outputs, TILE)
    if size > 64:
        return None
    if size > 32 and tiles < 256 and inputs < 8192:
        return None
    stages = _LONE_STAGES[size] if tiles <= multiprocessors else 3 if size > 32 else 4
    return SplitKPlan(TILE, 128, split_inputs(tiles, inputs, multiprocessors), stages)


def _measured_gated(rows: int, width: int, inputs: int, itemsize: int, multiprocessors: int) -> Plan:
    size = bucket(rows)
    if size is None or inputs % 8:
        return None
    if size == 1:
        return choose_normed(inputs, True)
    if itemsize != 2 or inputs % 128:
        return None
    tiles = ceil_div(width, TILE)
    split, lone = split_inputs(tiles, inputs, multiprocessors), tiles <= multiprocessors
    if size <= 16:
        return SplitKPlan(TILE, 128, split, 4 if lone else 3)
    if size > 64:
        # One program fills a multiprocessor, and a second wave has to be nearly full to be worth its time.
        waves = ceil_div(tiles, multiprocessors)
        return SplitKPlan(TILE, 64, split, 6) if tiles > 0.8 * waves * multiprocessors else None
    return SplitKPlan(TILE, 64, split, 6 if lone else 4)


def choose_normed(inputs: int, gated: bool) -> GemvPlan | None:
    """Choose the plan of one row's product, fused with the norm before it.

    gated: fuse the activation too. None stands for separate kernels.
    """
    if inputs % 8 or inputs > MAX_NORM:
        return None
    whole = 1 << (inputs - 1).bit_length()
    if whole <= 2048:
        return GemvPlan(2, whole, 2) if gated else GemvPlan(8, whole)
    if whole <= 4096:
        return GemvPlan(4, whole) if gated else GemvPlan(4, whole, 2, 8)
    return GemvPlan(2, whole, 1, 8)


def block_rows(rows: int) -> int:
    """Return the padded row count of x in a split-K product, at least 16.

    Fewer rows would do without Hopper's instruction.
    """
    return max(16, 1 << (rows - 1).bit_length())


def workspace_size(rows: int, outputs: int, plan: SplitKPlan, gated: bool = False) -> tuple[int, int]:
    """Return the number of floats and of counters that a split-K product needs.

    outputs: columns of y.
    """
    if plan.split == 1:
        return 0, 0
    tiles = ceil_div(outputs, plan.block_n)
    return tiles * plan.split * plan.block_n * block_rows(rows) * (2 if gated else 1), tiles


def split_inputs(tiles: int, inputs: int, multiprocessors: int) -> int:
    """Return the number of parts into which to divide K.

    It makes about as many programs as multiprocessors, never more.
    """
    return max(1, min(multiprocessors // tiles, MAX_SPLIT, inputs // 128))
