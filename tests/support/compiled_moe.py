"""Launches of kernels of mixtures of experts to be compiled by `compiled_kernels`."""

from collections.abc import Iterator

import torch

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gpu_traits import FP8_CAPABILITY, GpuTraits
from tandem.engine_core.kernels.moe.expert_gemv import down_gemv, gate_up_gemv
from tandem.engine_core.kernels.moe.grouped_gemm import combine, grouped_down, grouped_gate_up
from tandem.engine_core.kernels.moe.int4_gemv import int4_pair_gemv
from tandem.engine_core.kernels.moe.int4_grouped_gemm import int4_grouped_gemm
from tandem.engine_core.kernels.moe.int4_narrow_gemm import int4_narrow_gemm
from tandem.engine_core.kernels.moe.int4_weights import Int4Weights
from tandem.engine_core.kernels.moe.plans import GEMV_TOKENS, choose_expert_plan, choose_router
from tandem.engine_core.kernels.moe.route import normed_router, route, router_partials
from tandem.engine_core.kernels.moe.routing import Routed, Routing, SharedOutput
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, empty_quantized_activation
from tandem.engine_core.kernels.tiles.plan_types import NARROW_BLOCK, GemvPlan, GroupedPlan
from tandem.engine_core.kernels.tiles.table import ExpertKey, ExpertPart
from tests.support.compiled_matmuls import BOTH, FP8, Launch, half

HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 128, 8
"""Sizes of Qwen3-30B-A3B."""


def empty_routing(tokens: int, experts: int, top_k: int) -> Routed:
    """A routing without contents."""
    integers = torch.empty(experts, tokens, dtype=torch.int32)
    ids = torch.empty(tokens, top_k, dtype=torch.int32)
    return Routed(ids, torch.empty(tokens, top_k), integers[:, 0].contiguous(), integers)


def mixtures(gpu: GpuTraits, rows: tuple[int, ...], bits: tuple[int, ...] = (16, 8)) -> Iterator[Launch]:
    """The kernels of a layer for some numbers of tokens, with 16-bit weights and FP8 in blocks and with row scales."""
    yield from wide_experts(gpu)
    yield from shared_experts(gpu)
    for tokens in rows:
        yield from routings(gpu, tokens)
        yield from stacked_experts(gpu, tokens)
        yield from int4_experts(gpu, tokens)
        for weight_bits in bits:
            for by_block in BOTH if weight_bits == 8 else (False,):
                yield from experts(gpu, tokens, weight_bits, by_block)


def wide_experts(gpu: GpuTraits) -> Iterator[Launch]:
    """The down projection of one token with the sizes of Qwen3-235B-A22B in FP8 blocks, which takes two steps."""
    dtype = FP8 if gpu.capability >= FP8_CAPABILITY else torch.uint8
    down, scales = half(128, 4096, 1536, dtype=dtype), torch.empty(128, 4096 // 128, 1536 // 128)
    plan = choose_expert_plan(ExpertKey("down", 8, 16, 4096, 1536, 128, 8, 1), gpu)
    assert isinstance(plan, GemvPlan) and plan.block_k < 1536
    yield lambda: down_gemv(half(1, 8, 1536), down, scales, empty_routing(1, 128, 8), plan, gpu.pdl)


def shared_experts(gpu: GpuTraits) -> Iterator[Launch]:
    """The last kernels of 2 and of 8 tokens, with a shared expert."""
    few, more = (SharedOutput(half(count, HIDDEN), half(count, HIDDEN), half(1, HIDDEN)) for count in (2, 8))
    plan = choose_expert_plan(ExpertKey("down", 16, 16, HIDDEN, WIDTH, EXPERTS, TOP_K, 2), gpu)
    assert isinstance(plan, GemvPlan)
    hidden, down = half(2, TOP_K, WIDTH), half(EXPERTS, HIDDEN, WIDTH)
    yield lambda: down_gemv(hidden, down, None, empty_routing(2, EXPERTS, TOP_K), plan, gpu.pdl, few)
    yield lambda: combine(half(8 * TOP_K, HIDDEN), empty_routing(8, EXPERTS, TOP_K), gpu.pdl, more)


def stacked_experts(gpu: GpuTraits, tokens: int) -> Iterator[Launch]:
    """Top-k and down projections of Qwen3.6-35B-A3B in FP8 blocks, its shared expert among the others."""
    experts, top_k, width = 257, 9, 512
    dtype = FP8 if gpu.capability >= FP8_CAPABILITY else torch.uint8
    down, scales = half(experts, HIDDEN, width, dtype=dtype), torch.empty(experts, HIDDEN // 128, width // 128)
    counts, switch = torch.empty(experts, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    partials, rows = torch.empty(2, tokens, experts), torch.empty(tokens, dtype=torch.int32)
    given = partials, counts, top_k - 1, Routing.TOP_K_SOFTMAX, switch, rows, 0, tokens > GEMV_TOKENS, True
    yield lambda: route(*given, gpu.pdl)
    plan = choose_expert_plan(ExpertKey("down", 8, 16, HIDDEN, width, experts, top_k, tokens), gpu)
    if isinstance(plan, GemvPlan):
        hidden, routed = half(tokens, top_k, width), empty_routing(tokens, experts, top_k)
        yield lambda: down_gemv(hidden, down, scales, routed, plan, gpu.pdl)


def routings(gpu: GpuTraits, tokens: int) -> Iterator[Launch]:
    """The router and its top-k."""
    x, switch = half(tokens, HIDDEN), torch.zeros(1, dtype=torch.int32)
    weights = half(EXPERTS, HIDDEN), half(EXPERTS, HIDDEN, dtype=torch.float32)
    counts, partials = torch.empty(EXPERTS, dtype=torch.int32), torch.empty(1, tokens, EXPERTS)
    for weight in weights:
        if tokens <= GEMV_TOKENS:
            yield lambda weight=weight: normed_router(x, x, half(HIDDEN), 1e-6, weight, gpu.pdl)
        elif gpu.capability >= FP8_CAPABILITY:
            quantizing = (x, x, half(HIDDEN), 1e-6, weight, gpu.pdl, ActivationFormat(FP8, 128))
            yield lambda given=quantizing: normed_router(*given)
        plan = choose_router(tokens, HIDDEN, 8 * weight.itemsize)
        yield lambda weight=weight, plan=plan: router_partials(x, weight, plan, gpu.pdl)
    rows = torch.empty(tokens, dtype=torch.int32)
    yield lambda: route(partials, counts, TOP_K, Routing.SOFTMAX, switch, rows, 0, tokens > GEMV_TOKENS, False, gpu.pdl)


def int4_experts(gpu: GpuTraits, tokens: int) -> Iterator[Launch]:
    """The experts' matmuls with int4 weights in groups of 128, and of 32."""
    for group in (128, 32):
        first, last = (
            Int4Weights(
                half(parts, outputs, inputs // 8, dtype=torch.int32),
                torch.empty(parts, inputs // group, outputs),
                half(parts, inputs // group, outputs, dtype=torch.uint8),
            )
            for parts, outputs, inputs in ((2 * EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
        )
        routed, x, pairs = empty_routing(tokens, EXPERTS, TOP_K), half(tokens, HIDDEN), half(tokens * TOP_K, WIDTH)
        for part, weight, given in (("gate_up", first, x), ("down", last, pairs)):
            key = ExpertKey("gate_up" if part == "gate_up" else "down", 4, 16, HIDDEN, WIDTH, EXPERTS, TOP_K, tokens)
            plan, activation = choose_expert_plan(key, gpu), Activation.SILU if part == "gate_up" else None
            call = (given, weight, routed, activation, plan, gpu.pdl)
            if isinstance(plan, GemvPlan):
                yield lambda call=call: int4_pair_gemv(*call)
                continue
            yield lambda call=call: int4_grouped_gemm(*call)
            if tokens <= NARROW_BLOCK:
                own = GroupedPlan(NARROW_BLOCK, 64 if part == "gate_up" else 128, 128, 3, 4)
                yield lambda call=(*call[:4], own, gpu.pdl): int4_narrow_gemm(*call)


def experts(gpu: GpuTraits, tokens: int, bits: int, by_block: bool) -> Iterator[Launch]:
    """The experts' matmuls and their sum."""
    dtype = torch.bfloat16 if bits == 16 else FP8 if gpu.capability >= FP8_CAPABILITY else torch.uint8
    gate_up, down = half(EXPERTS, 2 * WIDTH, HIDDEN, dtype=dtype), half(EXPERTS, HIDDEN, WIDTH, dtype=dtype)
    scales: list[torch.Tensor | None] = [None, None]
    if bits == 8:
        scales = [torch.empty(2 * EXPERTS, WIDTH), torch.empty(EXPERTS, HIDDEN)]
    if by_block:
        scales = [torch.empty(2 * EXPERTS, WIDTH // 128, HIDDEN // 128)]
        scales += [torch.empty(EXPERTS, HIDDEN // 128, WIDTH // 128)]
    routed, x = empty_routing(tokens, EXPERTS, TOP_K), half(tokens, HIDDEN)
    parts: tuple[ExpertPart, ...] = ("gate_up", "down")
    sizes = HIDDEN, WIDTH, EXPERTS, TOP_K, tokens
    if tokens <= GEMV_TOKENS:
        first, second = (choose_expert_plan(ExpertKey(part, bits, 16, *sizes), gpu) for part in parts)
        assert isinstance(first, GemvPlan) and isinstance(second, GemvPlan)
        hidden = half(tokens, TOP_K, WIDTH)
        yield lambda: gate_up_gemv(x, gate_up, scales[0], routed, Activation.SILU, first, gpu.pdl)
        yield lambda: down_gemv(hidden, down, scales[1], routed, second, gpu.pdl)
        return
    pairs = half(tokens * TOP_K, WIDTH)
    formats: list[ActivationFormat | None] = [None]
    if dtype == FP8:
        formats.append(ActivationFormat(FP8, 128 if by_block else None))
    for to in formats:
        x_bits = 16 if to is None else 8
        plans = [choose_expert_plan(ExpertKey(part, bits, x_bits, *sizes), gpu) for part in parts]
        assert all(isinstance(plan, GroupedPlan) for plan in plans)
        rows: object = x
        own: object = pairs
        if to is not None:
            rows, own = (
                empty_quantized_activation(len(given), given.shape[1], torch.bfloat16, to, x.device)
                for given in (x, pairs)
            )
        out = to if by_block else None
        given = (rows, gate_up, scales[0], routed, Activation.SILU, plans[0], out, gpu.pdl)
        yield lambda given=given: grouped_gate_up(*given)
        last = (own, down, scales[1], routed, plans[1], gpu.pdl)
        yield lambda last=last: grouped_down(*last)
    yield lambda: combine(half(tokens * TOP_K, HIDDEN), routed, gpu.pdl)
