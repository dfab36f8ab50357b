"""Routing of tokens to experts in Triton: the router's matmul, top-k, and the sort by expert.

The matmul is split along K into float32 partial sums, which the second kernel adds in a fixed order. A program of the
second kernel chooses the experts of a few tokens, and appends the pairs to the lists of the experts using atomics. The
order of a list is not deterministic, but results are: the kernels that read it compute the rows of a tile independently
and write each at the index of its pair.

Oracle: `reference.moe.route`. `pdl`: see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.linear.gemv import normed_input
from tandem.engine_core.kernels.moe.plans import NORMED_TOKENS, choose_router
from tandem.engine_core.kernels.moe.routing import Routed, Routing
from tandem.engine_core.kernels.norm import add_rms_norm, add_rms_norm_and_quantize
from tandem.engine_core.kernels.quantize import group_of, store_quantized
from tandem.engine_core.kernels.quantized_activation import (
    ActivationFormat,
    QuantizedActivation,
    empty_quantized_activation,
)
from tandem.engine_core.kernels.tiles.plan_types import RouterPlan

MAX_NORMED_INPUTS = 8192
"""Maximum number of inputs of `normed_router`, which one program holds."""
ONE_ROW_SUMS = 520
"""Maximum number of logits for which a program of `normed_router` computes one: 512, and those of shared experts."""


@triton.jit
def _router_kernel(
    x_ptr,
    weight_ptr,
    partials_ptr,
    counts_ptr,
    T,
    E,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_COUNTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a partial sum of the router's logits over part of the inputs, and clear the counts.

    x: [T, K]; weight: [E, K]; partials: [SPLIT, T, E] float32.
    """
    # Three TF32 matmuls are about as exact as one in float32. With weights in float32, most models have 16-bit x.
    both: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 32
    precision: tl.constexpr = "ieee" if both else "tf32x3"
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    part = tl.program_id(2)
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    experts = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    offs_k = part * (STEPS * BLOCK_K) + tl.arange(0, BLOCK_K)
    left_ptr = weight_ptr + experts.to(tl.int64)[:, None] * K + offs_k[None, :]
    right_ptr = x_ptr + tokens.to(tl.int64)[None, :] * K + offs_k[:, None]
    sums = tl.zeros([BLOCK_E, BLOCK_M], tl.float32)
    wait_for_previous(PDL)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (part == 0):
        index = tl.arange(0, BLOCK_COUNTS)
        tl.store(counts_ptr + index, tl.zeros([BLOCK_COUNTS], tl.int32), mask=index < E)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        within = offs_k + step * BLOCK_K < K
        weights = tl.load(left_ptr + step * BLOCK_K, mask=(experts < E)[:, None] & within[None, :], other=0.0)
        vectors = tl.load(right_ptr + step * BLOCK_K, mask=(tokens < T)[None, :] & within[:, None], other=0.0)
        sums = tl.dot(weights, vectors.to(dtype), sums, input_precision=precision)
    offs = (part * T + tokens).to(tl.int64)[None, :] * E + experts[:, None]
    tl.store(partials_ptr + offs, sums, mask=(tokens < T)[None, :] & (experts < E)[:, None])


@triton.jit(do_not_specialize=["scale_stride"])
def _normed_router_kernel(
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    weight_ptr,
    total_ptr,
    normed_ptr,
    logits_ptr,
    counts_ptr,
    values_ptr,
    scales_ptr,
    scale_stride,
    eps,
    E,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_COUNTS: tl.constexpr,
    QUANT: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add and normalize one token, and multiply it by some rows of the router's weight.

    x, residual: [T, K]; total, normed: likewise, written; weight: [E, K]; logits: [T, E] float32. QUANT: write the norm
    quantized as well, as values with scales.
    """
    token = tl.program_id(1).to(tl.int64)
    experts = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    mask = (experts < E)[:, None] & mask_k[None, :]
    weights = tl.load(weight_ptr + experts.to(tl.int64)[:, None] * K + offs_k[None, :], mask=mask, other=0.0)
    norm_weight = tl.load(norm_weight_ptr + offs_k, mask=mask_k, other=0.0)
    wait_for_previous(PDL)
    if (tl.program_id(0) == 0) & (token == 0):
        index = tl.arange(0, BLOCK_COUNTS)
        tl.store(counts_ptr + index, tl.zeros([BLOCK_COUNTS], tl.int32), mask=index < E)
    row = token * K
    vector = normed_input(
        x_ptr + row,
        norm_weight,
        norm_weight,
        residual_ptr + row,
        total_ptr + row,
        eps,
        offs_k,
        mask_k,
        K,
        2,
    )
    if tl.program_id(0) == 0:
        tl.store(normed_ptr + row + offs_k, vector.to(normed_ptr.dtype.element_ty), mask=mask_k)
    if QUANT:  # noqa: SIM102 - Triton would compile the other side of an `and`.
        if tl.program_id(0) == tl.num_programs(0) - 1:
            store_quantized(values_ptr, scales_ptr, token, 0, vector, K, scale_stride, GROUP, BLOCK_K)
    sums = tl.sum(weights.to(tl.float32) * vector[None, :], 1)
    tl.store(logits_ptr + token * E + experts, sums, mask=experts < E)


@triton.jit
def _hashed(index, seed):
    """Hash integers to float32 values in [0, 1), using the finalizer of MurmurHash3 (Appleby, 2008)."""
    bits = index.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32) * 0x85EBCA77
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    bits = bits ^ (bits >> 16)
    return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit(do_not_specialize=["T", "seed"])
def _route_kernel(
    partials_ptr,
    rows_ptr,
    uniform_ptr,
    ids_ptr,
    weights_ptr,
    counts_ptr,
    pairs_ptr,
    T,
    E,
    seed,
    TOP_K: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    SORT: tl.constexpr,
    STACKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the experts of TOKENS tokens, and append their pairs to the lists of the experts.

    partials: [SPLIT, T, E + STACKED] float32; rows: [T] int32 if HAS_ROWS, 0 for padding; uniform: [1] int32; if not 0,
    hashes of token index, expert index and `seed` replace the logits, also for padding; ids, weights, counts,
    pairs: as in `Routed`. STACKED: 1 if all tokens use expert E, and column E is the logit of its weight; else 0.
    """
    WIDTH: tl.constexpr = TOP_K + STACKED
    stride = E + STACKED
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    experts = tl.arange(0, BLOCK_E)
    mask = (tokens < T)[:, None] & (experts < E)[None, :]
    offs = tokens.to(tl.int64)[:, None] * stride + experts[None, :]
    uniform = tl.load(uniform_ptr) != 0
    routed = tokens < T
    if HAS_ROWS:
        routed = routed & ((tl.load(rows_ptr + tokens, mask=tokens < T, other=0) != 0) | uniform)
    random = _hashed(tokens[:, None] * E + experts[None, :], seed)
    wait_for_previous(PDL)
    logits = tl.load(partials_ptr + offs, mask=mask, other=0.0)
    for part in tl.static_range(1, SPLIT):
        logits += tl.load(partials_ptr + part * T.to(tl.int64) * stride + offs, mask=mask, other=0.0)
    if STACKED > 0:
        gate_ptr = partials_ptr + tokens.to(tl.int64) * stride + E
        gate = tl.load(gate_ptr, mask=tokens < T, other=0.0)
        for part in tl.static_range(1, SPLIT):
            gate += tl.load(gate_ptr + part * T.to(tl.int64) * stride, mask=tokens < T, other=0.0)
    logits = tl.where(uniform, random, logits)
    # NaN counts as the lowest logit, so that every index is a valid expert. -0 becomes 0, which it is equal to.
    known = tl.where(logits == logits, logits, float("-inf")) + 0.0
    bits = known.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    # The logit, then the lowest index: keys are distinct. Experts past the end, and those chosen, get the lowest key.
    lowest = tl.full([TOKENS, BLOCK_E], -(1 << 63) + 1, tl.int64)
    keys = tl.where((experts < E)[None, :], (ordered << 32) + (BLOCK_E - 1 - experts)[None, :], lowest)
    columns = tl.arange(0, BLOCK_TOP)
    chosen = tl.zeros([TOKENS, BLOCK_TOP], tl.int32)
    values = tl.full([TOKENS, BLOCK_TOP], float("-inf"), tl.float32)
    for rank in tl.static_range(TOP_K):
        best = tl.max(keys, 1)
        index = BLOCK_E - 1 - (best & 0x7FFFFFFF).to(tl.int32)
        top = (best >> 32).to(tl.int32)
        top = tl.where(top < 0, top ^ 0x7FFFFFFF, top).to(tl.float32, bitcast=True)
        chosen = tl.where((columns == rank)[None, :], index[:, None], chosen)
        values = tl.where((columns == rank)[None, :], top[:, None], values)
        keys = tl.where(experts[None, :] == index[:, None], lowest, keys)
    largest = tl.max(values, 1)
    scores = tl.exp(values - largest[:, None])
    if RENORMALIZE:
        total = tl.sum(scores, 1)
    else:
        total = tl.sum(tl.where((experts < E)[None, :], tl.exp(logits - largest[:, None]), 0.0), 1)
    weights = scores / total[:, None]
    inside = (tokens < T)[:, None] & (columns < TOP_K)[None, :]
    pair = tokens[:, None] * WIDTH + columns[None, :]
    tl.store(ids_ptr + pair, tl.where(routed[:, None], chosen, -1), mask=inside)
    tl.store(weights_ptr + pair, tl.where(routed[:, None], weights, 0.0), mask=inside)
    if SORT:
        counted = inside & routed[:, None]
        rank = tl.atomic_add(counts_ptr + chosen, 1, mask=counted, sem="relaxed")
        tl.store(pairs_ptr + chosen.to(tl.int64) * T + rank, pair, mask=counted)
    if STACKED > 0:
        last = tokens * WIDTH + TOP_K
        tl.store(ids_ptr + last, tl.where(routed, E, -1), mask=tokens < T)
        tl.store(weights_ptr + last, tl.where(routed, tl.sigmoid(gate), 0.0), mask=tokens < T)
        if SORT:
            # All tokens are listed, which needs no atomics: on one address these run one by one.
            tl.store(pairs_ptr + T.to(tl.int64) * E + tokens, last, mask=tokens < T)
            if tl.program_id(0) == 0:
                tl.store(counts_ptr + E, T)


def router_partials(x: Tensor, weight: Tensor, plan: RouterPlan, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """Return the logits of a router as partial sums, [split, T, E] float32, and cleared counts, [E] int32.

    x: [T, inputs], contiguous; weight: [E, inputs], contiguous, in x's dtype or float32.
    """
    (tokens, inputs), experts = x.shape, weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous() and weight.shape[1] == inputs
    partials = torch.empty(plan.split, tokens, experts, device=x.device)
    counts = torch.empty(experts, device=x.device, dtype=torch.int32)
    grid = (triton.cdiv(tokens, plan.block_m), triton.cdiv(experts, plan.block_e), plan.split)
    _router_kernel[grid](
        *(x, weight, partials, counts, tokens, experts),
        K=inputs,
        BLOCK_M=plan.block_m,
        BLOCK_E=plan.block_e,
        BLOCK_K=plan.block_k,
        SPLIT=plan.split,
        STAGES=plan.stages,
        BLOCK_COUNTS=triton.next_power_of_2(experts),
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return partials, counts


def normed_router(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    pdl: bool = False,
    to: ActivationFormat | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, QuantizedActivation | None]:
    """Add and normalize a few tokens, and multiply them by a router's weight, in one launch.

    x, residual: [T, inputs], contiguous; norm_weight: [inputs]; weight: as in `router_partials`. Returns the normalized
    sum, the sum, the logits as one partial sum, [1, T, E] float32, cleared counts, [E] int32, and the normalized sum in
    the format `to`, None without one. Oracles: `reference.layer.add_rms_norm`, `reference.moe.router_logits`,
    `reference.quantized_activation.quantize`.
    """
    (tokens, inputs), experts = x.shape, weight.shape[0]
    assert x.is_contiguous() and residual.is_contiguous() and weight.is_contiguous() and weight.shape[1] == inputs
    assert inputs <= MAX_NORMED_INPUTS, f"{inputs} inputs do not fit one program"
    total, normed = torch.empty_like(x), torch.empty_like(x)
    logits = torch.empty(1, tokens, experts, device=x.device)
    counts = torch.empty(experts, device=x.device, dtype=torch.int32)
    quantized = None if to is None else empty_quantized_activation(tokens, inputs, x.dtype, to, x.device)
    target = (x, x) if quantized is None else (quantized.values, quantized.scales)
    rows = 1 if tokens * experts <= ONE_ROW_SUMS else 4
    _normed_router_kernel[(triton.cdiv(experts, rows), tokens)](
        *(x, residual, norm_weight, weight, total, normed, logits, counts, *target, len(target[0]), eps, experts),
        K=inputs,
        ROWS=rows,
        BLOCK_K=triton.next_power_of_2(inputs),
        BLOCK_COUNTS=triton.next_power_of_2(experts),
        QUANT=to is not None,
        GROUP=0 if to is None else group_of(to),
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return normed, total, logits, counts, quantized


def norm_and_route(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    top_k: int,
    routing: Routing,
    uniform: Tensor,
    rows: Tensor | None,
    seed: int,
    to: ActivationFormat | None = None,
    sort: bool = True,
    shared: bool = False,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Routed, QuantizedActivation | None]:
    """Add x to the residual stream, normalize it, and choose the experts of each token.

    Arguments and results: see the oracle, `reference.moe.norm_and_route`.
    """
    tokens, inputs = x.shape
    if tokens <= NORMED_TOKENS and inputs <= MAX_NORMED_INPUTS and x.is_contiguous() and residual.is_contiguous():
        given = normed_router(x, residual, norm_weight, eps, weight, pdl, to)
        normed, total, partials, counts, quantized = given
    else:
        quantized = None
        if to is None:
            normed, total = add_rms_norm(x, residual, norm_weight, eps, None, pdl)
        else:
            normed, total, quantized = add_rms_norm_and_quantize(x, residual, norm_weight, eps, to, pdl)
        partials, counts = router_partials(normed, weight, choose_router(tokens, inputs, 8 * weight.itemsize), pdl)
    routed = route(partials, counts, top_k, routing, uniform, rows, seed, sort, shared, pdl)
    return normed, total, routed, quantized


def route(
    partials: Tensor,
    counts: Tensor,
    top_k: int,
    routing: Routing,
    uniform: Tensor,
    rows: Tensor | None = None,
    seed: int = 0,
    sort: bool = True,
    shared: bool = False,
    pdl: bool = False,
) -> Routed:
    """Choose the experts of each token.

    partials, counts: from `router_partials` or `normed_router`; uniform: [1] int32; if not 0, all tokens
    are routed pseudorandomly by `seed` and token index; rows: [T] int32, 0 for padding, which
    is not routed; None: no padding; sort: whether to list the pairs of each expert; shared: whether the last expert is
    used by all tokens, as in `reference.moe.route`.
    """
    split, tokens, columns = partials.shape
    experts, each = columns - shared, top_k + shared
    assert 0 < top_k <= experts, f"{top_k} of {experts} experts"
    ids = torch.empty(tokens, each, device=partials.device, dtype=torch.int32)
    weights = torch.empty(tokens, each, device=partials.device)
    pairs = torch.empty(columns, tokens, device=partials.device, dtype=torch.int32) if sort else None
    block = max(16, triton.next_power_of_2(experts))
    count = 1 if tokens <= 256 else 4
    _route_kernel[(triton.cdiv(tokens, count),)](
        *(partials, ids if rows is None else rows, uniform, ids, weights, counts, ids if pairs is None else pairs),
        *(tokens, experts, seed),
        TOP_K=top_k,
        SPLIT=split,
        TOKENS=count,
        BLOCK_E=block,
        BLOCK_TOP=triton.next_power_of_2(top_k),
        RENORMALIZE=routing.renormalizes,
        HAS_ROWS=rows is not None,
        SORT=sort,
        STACKED=int(shared),
        PDL=pdl,
        num_warps=1 if block * count <= 512 else 4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return Routed(ids, weights, counts if sort else None, pairs)
