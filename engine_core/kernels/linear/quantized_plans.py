"""Kernels for products with quantized weights, by shape and number of rows.

What was measured on a GPU is in its tile table; the rules here follow those of 16-bit weights, at a half or a quarter
of the bytes. None stands for a library's product.
"""

from dataclasses import replace

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.linear.plans import (
    MAX_NORM,
    TILE,
    bucket,
    normed_rule,
    split_inputs,
)
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, Plan, SplitKPlan
from tandem.engine_core.kernels.tiles.table import Operation, ProductKey

MAX_ROWS = 64
"""Most rows for which the weights are decoded inside the product; beyond, tensor cores have enough to do with bytes."""
SCALE_ROWS, SCALE_COLUMNS = 16, 128
"""Shape of a block with a scale of its own: low, so that blocks end where parts of a fused projection do."""
_BLOCK_K = 128
_INPUT_BYTES = 2
MAX_STAGES = 6
"""Pipeline stages where the shared memory holds them."""


def choose_bytes(rows: int, outputs: int, inputs: int, gpu: GpuTraits) -> Plan:
    """Choose the plan of y = x W^T for 16-bit x."""
    if rows == 1 and inputs % 16 == 0:
        rule: Plan = GemvPlan(4, min(2048, 1 << (inputs - 1).bit_length()))
        return gpu.tiles.product(ProductKey("product", 8, outputs, inputs, 1), rule)
    return _splitk(rows, outputs, inputs, gpu, gated=False, bits=8)


def choose_bytes_gated(rows: int, width: int, inputs: int, gpu: GpuTraits) -> Plan:
    """Choose the plan of activation(x G^T) * (x U^T) in one kernel.

    width: number of outputs.
    """
    if rows == 1 and inputs % 16 == 0:
        return gpu.tiles.product(ProductKey("gated", 8, width, inputs, 1), normed_rule(inputs, True))
    return _splitk(rows, width, inputs, gpu, gated=True, bits=8)


def choose_nibbles(rows: int, outputs: int, inputs: int, group: int, gpu: GpuTraits) -> Plan:
    """Choose the plan of y = x W^T with W of four bits in groups of inputs."""
    if rows == 1:
        return gpu.tiles.product(ProductKey("product", 4, outputs, inputs, 1), _nibble_rule(inputs))
    return _splitk(rows, outputs, inputs, gpu, gated=False, bits=4, group=group)


def choose_nibbles_gated(rows: int, width: int, inputs: int, group: int, gpu: GpuTraits) -> Plan:
    """Choose the plan of activation(x G^T) * (x U^T) with weights of four bits.

    width: number of outputs; group: number of inputs of a group.
    """
    if rows == 1:
        return gpu.tiles.product(ProductKey("gated", 4, width, inputs, 1), _nibble_rule(inputs))
    return _splitk(rows, width, inputs, gpu, gated=True, bits=4, group=group)


def choose_nibbles_normed(outputs: int, inputs: int, gated: bool, gpu: GpuTraits) -> GemvPlan | None:
    """Choose the plan of one row's product, fused with the norm before it.

    The weights have four bits; outputs: as in `choose_normed`. None stands for separate kernels.
    """
    if inputs > MAX_NORM:
        return None
    rule = GemvPlan(4, 1 << (inputs - 1).bit_length())
    operation: Operation = "normed_gated" if gated else "normed"
    found = gpu.tiles.product(ProductKey(operation, 4, outputs, inputs, 1), rule)
    return found if isinstance(found, GemvPlan) else rule


def _nibble_rule(inputs: int) -> GemvPlan:
    return GemvPlan(4, min(2048, 1 << (inputs - 1).bit_length()))


def _splitk(
    rows: int, outputs: int, inputs: int, gpu: GpuTraits, *, gated: bool, bits: int, group: int = _BLOCK_K
) -> Plan:
    size = bucket(rows)
    block = min(group, _BLOCK_K)
    if size is None or size > MAX_ROWS or inputs % block or group % block:
        return None
    operation: Operation = "gated" if gated else "product"
    split = split_inputs(ceil_div(outputs, TILE), inputs, gpu.multiprocessors)
    rule = SplitKPlan(TILE, block, split, MAX_STAGES)
    plan = gpu.tiles.product(ProductKey(operation, bits, outputs, inputs, size), rule)
    if isinstance(plan, SplitKPlan) and group % plan.block_k:
        # Measured with larger groups.
        plan = rule
    if not isinstance(plan, SplitKPlan):
        return plan
    weight_bytes = plan.block_n * (2 if gated else 1) * bits / 8
    stage_bytes = int((weight_bytes + max(size, 16) * _INPUT_BYTES) * plan.block_k)
    # Unpacked weights pass through shared memory into the layout of the product.
    unpacked = plan.block_n * plan.block_k * _INPUT_BYTES if bits < 8 else 0
    return replace(plan, stages=min(plan.stages, gpu.max_stages(stage_bytes, unpacked, warpgroup=False)))
