"""Choice of the kernels of a mixture of experts, and of their launch parameters.

Up to `GEMV_TOKENS` tokens, each pair is a GEMV. Above, blocks of pairs of one expert are multiplied in tensor cores.
The size of a block follows from the expected number of pairs per expert: a smaller one pads less, a larger one reads
the weights of an expert fewer times.
"""

from typing import Literal

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, GroupedPlan, RouterPlan

GEMV_TOKENS = 4
"""Maximum number of tokens for which each pair of a token and an expert is a GEMV."""
Part = Literal["gate_up", "down"]
WeightBits = Literal[8, 16]


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


def choose_gate_up_gemv(inputs: int, itemsize: int) -> GemvPlan:
    """Choose the plan of the gate and up projections of single pairs. itemsize: bytes of a weight."""
    whole = 1 << (inputs - 1).bit_length()
    if whole <= 2048:
        return GemvPlan(2 if itemsize > 1 else 4, whole, 2)
    return GemvPlan(2, min(whole, 2048), 1)


def choose_down_gemv(inputs: int) -> GemvPlan:
    """Choose the plan of the down projection of single pairs."""
    return GemvPlan(4, min(1024, 1 << (inputs - 1).bit_length()))


def block_pairs(pairs: int, experts: int) -> int:
    """Return the size of a block of pairs: 16, 32, 64 or 128."""
    expected = ceil_div(pairs, experts)
    if expected <= 12:
        return 16
    if expected <= 32:
        return 32
    return 64 if expected <= 96 else 128


def choose_grouped(
    part: Part, tokens: int, top_k: int, experts: int, weight_bits: WeightBits, x_bits: WeightBits, gpu: GpuTraits
) -> GroupedPlan:
    """Choose the plan of a grouped GEMM.

    x_bits: of an activation; 8 needs weights of 8 bits.
    """
    block = block_pairs(tokens * top_k, experts)
    gated = part == "gate_up"
    if weight_bits == 16:
        plan = GroupedPlan(block, 64, 128, 4, 4) if block <= 32 else GroupedPlan(block, 128, 64, 4, 8)
    else:
        plan = GroupedPlan(block, 128, 128, 4, 4 if block <= 32 else 8)
    stage = (plan.block_n * (2 if gated else 1) * weight_bits + block * x_bits) // 8 * plan.block_k
    epilogue = plan.block_n * block * 4
    stages = gpu.max_stages(
        stage, epilogue if stage * plan.stages + epilogue > gpu.shared_memory else 0, warpgroup=True
    )
    return GroupedPlan(block, plan.block_n, plan.block_k, min(plan.stages, stages), plan.warps)
