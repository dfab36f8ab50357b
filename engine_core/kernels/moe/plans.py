"""Choice of the kernels of a mixture of experts, and of their launch parameters.

Up to `GEMV_TOKENS` tokens, each pair is a GEMV; measured plans may go on with it. Above, blocks of pairs of one expert
are multiplied in tensor cores.
The size of a block follows from the expected number of pairs per expert: a smaller one pads less, a larger one reads
the weights of an expert fewer times.
"""

from dataclasses import replace

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.tiles.plan_types import INT4_BLOCK, ExpertPlan, GemvPlan, GroupedPlan, RouterPlan
from tandem.engine_core.kernels.tiles.table import EXPERT_BUCKETS, ExpertKey, ExpertPart

GEMV_TOKENS = 4
"""Maximum number of tokens for which each pair of a token and an expert is a GEMV without a measured plan."""
PARTS: tuple[ExpertPart, ...] = ("gate_up", "down")
INT4_OTHER_BYTES = 34 * 1024
"""Maximum shared memory of a program with int4 weights besides its stages: before Hopper, unpacked weights pass through
it to the tensor cores."""
NORMED_TOKENS = 16
"""Maximum number of tokens for which the norm is fused into the router's matmul."""
WIDE_SHARED_MEMORY = 160 * 1024
"""Minimum shared memory in bytes for tiles of 256 outputs."""


def max_blocks(pairs: int, experts: int, block: int) -> int:
    """Return the number of blocks of pairs that the worst routing needs.

    An expert fills its blocks except for the last.
    """
    return min(pairs, pairs // block + min(experts, pairs))


def choose_router(tokens: int, inputs: int, weight_bits: int) -> RouterPlan:
    """Choose the plan of a router's matmul.

    Tiles of 32-bit weights have as many bytes as tiles of 16-bit weights.
    """
    parts, words = max(1, inputs // 256), max(1, weight_bits // 16)
    if tokens <= 64:
        return RouterPlan(16, 16, 128 // words, min(4, parts), 3, 4)
    if tokens <= 512:
        return RouterPlan(16, 64, 128 // words, min(2, parts), 3, 4)
    return RouterPlan(64, 64, 64 // words, 1, 4, 4)


def _gate_up_gemv(inputs: int) -> GemvPlan:
    """Return the plan of the gate and up projections of single pairs."""
    return GemvPlan(4, min(2048, next_power_of_two(inputs)))


def _down_gemv(inputs: int, top_k: int) -> GemvPlan:
    """Return the plan of the down projection of single pairs.

    A program holds a tile of each expert of a token; see `tile_experts`.
    """
    block = min(next_power_of_two(inputs), 8192 // tile_experts(top_k))
    return GemvPlan(2, max(16, block), 1, 8)


def tile_experts(top_k: int) -> int:
    """Return the number of experts of a token that a tile of `down_gemv` holds, a power of two.

    They are all but the last if the tile would be half empty otherwise, as with 8 experts and a shared one.
    """
    whole = next_power_of_two(top_k)
    return whole // 2 if top_k > 4 and top_k == whole // 2 + 1 else whole


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


def choose_expert_plan(key: ExpertKey, gpu: GpuTraits) -> ExpertPlan:
    """Choose the plan of a matmul of experts: the GPU's measured one, or the rule's.

    key: with the actual number of tokens; activations of 8 bits need weights of 8 bits.
    """
    found, kind = _measured(key, gpu), GemvPlan if multiplies_pairs(key, gpu) else GroupedPlan
    return found if isinstance(found, kind) else expert_rule(key, gpu)


def multiplies_pairs(key: ExpertKey, gpu: GpuTraits) -> bool:
    """Return whether each pair of a token and an expert is a GEMV.

    With few tokens it is; with more, if the measured plans of both matmuls say so. key: of either matmul.
    """
    both = (_measured(key._replace(part=part, x_bits=16), gpu) for part in PARTS)
    return key.tokens <= GEMV_TOKENS or all(isinstance(plan, GemvPlan) for plan in both)


def _measured(key: ExpertKey, gpu: GpuTraits) -> ExpertPlan | None:
    bucket = next((size for size in EXPERT_BUCKETS if key.tokens <= size), 0)
    return gpu.tiles.experts.get(key._replace(tokens=bucket))


def _int4_rule(key: ExpertKey, gpu: GpuTraits) -> ExpertPlan:
    """Return the plan of a matmul with int4 weights by its sizes.

    A program of a GEMV holds whole rows. Sums are scaled before they are added, so that tiles of 64 pairs fill the
    registers. Narrow blocks are for measured plans.
    """
    gated = key.part == "gate_up"
    if key.tokens <= GEMV_TOKENS:
        whole = next_power_of_two(key.hidden if gated else key.width)
        return GemvPlan(4 if gated else 8, min(2048, max(INT4_BLOCK, whole)))
    block = min(64, block_pairs(key.tokens * key.top_k, key.experts))
    plan = GroupedPlan(block, 64 if gated else 128, 128, 4, 4 if block <= 32 else 8)
    # Words and inputs, and a scale and a zero point for each of 128 rows.
    stage = (128 * 4 + plan.block_m * key.x_bits) // 8 * plan.block_k + 128 * 5
    stages = gpu.max_stages(stage, INT4_OTHER_BYTES, warpgroup=True)
    return plan if plan.stages <= stages else replace(plan, stages=stages)


def expert_rule(key: ExpertKey, gpu: GpuTraits) -> ExpertPlan:
    """Return the plan of a matmul of experts by its sizes."""
    if key.weight_bits == 4:
        return _int4_rule(key, gpu)
    if key.tokens <= GEMV_TOKENS:
        return _gate_up_gemv(key.hidden) if key.part == "gate_up" else _down_gemv(key.width, key.top_k)
    block, halves = block_pairs(key.tokens * key.top_k, key.experts), 2 if key.part == "gate_up" else 1
    if key.weight_bits == 32:
        plan = GroupedPlan(min(block, 32), 32, 32, 3, 4)
    elif key.weight_bits == 8:
        # Two accumulators, and a matmul to scale before it is added, fill the registers with a tile of 64 pairs.
        block = min(block, 64) if halves == 2 else block
        plan = GroupedPlan(block, 128, 128, 3, 4 if block <= 32 else 8)
    elif block <= 32:
        plan = GroupedPlan(block, 64, 128, 3, 4)
    else:
        wide = block == 128 and halves == 1 and gpu.shared_memory >= WIDE_SHARED_MEMORY
        plan = GroupedPlan(block, 256 if wide else 128, 64, 3 if wide else 4, 8)
    stage = (plan.block_n * halves * key.weight_bits + plan.block_m * key.x_bits) // 8 * plan.block_k
    stages = gpu.max_stages(stage, warpgroup=True)
    return plan if plan.stages <= stages else replace(plan, stages=stages)
