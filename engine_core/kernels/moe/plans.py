"""Choice of the kernels of a mixture of experts, and of their launch parameters.

Up to `GEMV_TOKENS` tokens, each pair is a GEMV. Above, blocks of pairs of one expert are multiplied in tensor cores.
The size of a block follows from the expected number of pairs per expert: a smaller one pads less, a larger one reads
the weights of an expert fewer times.
"""

from dataclasses import replace
from typing import Literal

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, GroupedPlan, RouterPlan

GEMV_TOKENS = 4
"""Maximum number of tokens for which each pair of a token and an expert is a GEMV."""
WIDE_SHARED_MEMORY = 160 * 1024
"""Least shared memory in bytes for tiles of 256 outputs."""
Part = Literal["gate_up", "down"]
WeightBits = Literal[8, 16, 32]


def max_blocks(pairs: int, experts: int, block: int) -> int:
    """Return the number of blocks of pairs that the worst routing needs.

    An expert fills its blocks except for the last.
    """
    return min(pairs, pairs // block + min(experts, pairs))


def choose_router(tokens: int, inputs: int) -> RouterPlan:
    """Choose the plan of a router's matmul."""
    parts = max(1, inputs // 256)
    if tokens <= 64:
        return RouterPlan(16, 16, 128, min(4, parts), 3, 4)
    if tokens <= 512:
        return RouterPlan(16, 64, 128, min(2, parts), 3, 4)
    return RouterPlan(64, 64, 64, 1, 4, 4)


def choose_gate_up_gemv(inputs: int) -> GemvPlan:
    """Choose the plan of the gate and up projections of single pairs."""
    return GemvPlan(4, min(2048, next_power_of_two(inputs)))


def choose_down_gemv(inputs: int, top_k: int) -> GemvPlan:
    """Choose the plan of the down projection of single pairs.

    A program holds a tile of each expert of a token.
    """
    block = min(next_power_of_two(inputs), 8192 // next_power_of_two(top_k))
    return GemvPlan(2, max(16, block), 1, 8)


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


def block_pairs(pairs: int, experts: int) -> int:
    """Return the size of a block of pairs: 16, 32, 64 or 128."""
    expected = ceil_div(pairs, experts)
    if expected <= 12:
        return 16
    if expected <= 24:
        return 32
    return 64 if expected <= 96 else 128


def choose_grouped(
    part: Part, tokens: int, top_k: int, experts: int, weight_bits: WeightBits, x_bits: WeightBits, gpu: GpuTraits
) -> GroupedPlan:
    """Choose the plan of a grouped GEMM.

    x_bits: of an activation; 8 needs weights of 8 bits.
    """
    block, halves = block_pairs(tokens * top_k, experts), 2 if part == "gate_up" else 1
    if weight_bits == 32:
        plan = GroupedPlan(min(block, 32), 32, 32, 3, 4)
    elif weight_bits == 8:
        plan = GroupedPlan(block, 128, 128, 3, 4 if block <= 32 else 8)
    elif block <= 32:
        plan = GroupedPlan(block, 64, 128, 3, 4)
    else:
        wide = block == 128 and halves == 1 and gpu.shared_memory >= WIDE_SHARED_MEMORY
        plan = GroupedPlan(block, 256 if wide else 128, 64, 3 if wide else 4, 8)
    stage = (plan.block_n * halves * weight_bits + plan.block_m * x_bits) // 8 * plan.block_k
    stages = gpu.max_stages(stage, warpgroup=True)
    return plan if plan.stages <= stages else replace(plan, stages=stages)
