"""Kernels for products with quantized weights, by shape and number of rows.

These are rules after those of 16-bit weights, at a half or a quarter of the bytes. None stands for a library's product.
"""

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.linear.plans import (
    MAX_NORM,
    TILE,
    GemvPlan,
    Plan,
    SplitKPlan,
    bucket,
    choose_normed,
    split_inputs,
)

MAX_ROWS = 64
"""Most rows for which the weights are decoded inside the product; beyond, tensor cores have enough to do with bytes."""
SCALE_ROWS, SCALE_COLUMNS = 16, 128
"""Shape of a block with a scale of its own: low, so that blocks end where parts of a fused projection do."""
_BLOCK_K = 128
_INPUT_BYTES = 2


def choose_bytes(rows: int, outputs: int, inputs: int, gpu: GpuTraits) -> Plan:
    """Choose the plan of y = x W^T for 16-bit x."""
    if rows == 1 and inputs % 16 == 0:
        return GemvPlan(4, min(2048, 1 << (inputs - 1).bit_length()))
    return _splitk(rows, outputs, inputs, gpu, gated=False, weight_bytes=1)


def choose_bytes_gated(rows: int, width: int, inputs: int, gpu: GpuTraits) -> Plan:
    """Choose the plan of activation(x G^T) * (x U^T) in one kernel.

    width: number of outputs.
    """
    if rows == 1 and inputs % 16 == 0:
        return choose_normed(inputs, True)
    return _splitk(rows, width, inputs, gpu, gated=True, weight_bytes=1)


def choose_nibbles(rows: int, outputs: int, inputs: int, group: int, gpu: GpuTraits) -> Plan:
    """Choose the plan of y = x W^T with W of four bits in groups of inputs."""
    if rows == 1:
        return GemvPlan(4, min(2048, 1 << (inputs - 1).bit_length()))
    return _splitk(rows, outputs, inputs, gpu, gated=False, weight_bytes=0.5, group=group)


def choose_nibbles_gated(rows: int, width: int, inputs: int, group: int, gpu: GpuTraits) -> Plan:
    """Choose the plan of activation(x G^T) * (x U^T) with weights of four bits.

    width: number of outputs; group: number of inputs of a group.
    """
    if rows == 1:
        return choose_nibbles(rows, width, inputs, group, gpu)
    return _splitk(rows, width, inputs, gpu, gated=True, weight_bytes=0.5, group=group)


def choose_nibbles_normed(inputs: int) -> GemvPlan | None:
    """Choose the plan of one row's product, fused with the norm before it.

    The weights have four bits. None stands for separate kernels.
    """
    return None if inputs > MAX_NORM else GemvPlan(4, 1 << (inputs - 1).bit_length())


def _splitk(
    rows: int, outputs: int, inputs: int, gpu: GpuTraits, *, gated: bool, weight_bytes: float, group: int = _BLOCK_K
) -> Plan:
    size = bucket(rows)
    block = min(group, _BLOCK_K)
    if size is None or size > MAX_ROWS or inputs % block or group % block:
        return None
    tiles = ceil_div(outputs, TILE)
    stage_bytes = int((TILE * (2 if gated else 1) * weight_bytes + max(size, 16) * _INPUT_BYTES) * block)
    stages = min(6, gpu.max_stages(stage_bytes, warpgroup=False))
    return SplitKPlan(TILE, block, split_inputs(tiles, inputs, gpu.multiprocessors), stages)
