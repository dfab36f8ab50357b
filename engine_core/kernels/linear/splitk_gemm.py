"""y = x W^T for up to 128 rows of x, with K divided so that small weights too occupy the whole GPU.

The weights are the left operand, so that the 64 rows a tensor core instruction wants are rows of W and not padding of
x. Programs that share a tile of y leave float32 partial sums in a workspace; the last to arrive adds them in a fixed
order, so that results are the same from run to run, and finishes the tile. Counters return to zero by themselves.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.linear.gemv import silu_mul, with_bias
from tandem.engine_core.kernels.linear.plans import SplitKPlan, block_rows, workspace_size


@triton.jit(do_not_specialize=["M"])
def splitk_gemm_kernel(
    x,
    weight,
    bias,
    y,
    partials,
    counters,
    M,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    """x: [M, K]; weight: [N, K] (SILU: [2 N, K], gate first); y: [M, N]. Program (i, s) makes part s of N-tile i.

    partials: float32, [tiles, SPLIT, 1 or 2, BLOCK_N, BLOCK_M]; counters: int32 zeros, [tiles].
    """
    dtype: tl.constexpr = y.dtype.element_ty
    precision: tl.constexpr = "ieee" if weight.dtype.element_ty.primitive_bitwidth == 32 else "tf32"
    BLOCKS: tl.constexpr = K // BLOCK_K
    PER: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    tile = tl.program_id(0)
    part = tl.program_id(1)
    first = tile * BLOCK_N
    begin = part * BLOCKS // SPLIT
    count = (part + 1) * BLOCKS // SPLIT - begin
    rows = tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_K)
    # Weight rows past the end repeat the last one and are not stored. Tokens past the end are masked: programs all
    # reading one token's line again and again were slower by a tenth.
    offsets = tl.minimum(rows, N - 1 - first)[:, None] * K + cols[None, :]
    left = weight + first.to(tl.int64) * K + begin * BLOCK_K + offsets
    upper = left + N.to(tl.int64) * K
    right = x + begin * BLOCK_K + tokens[None, :] * K + cols[:, None]
    present = (tokens < M)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for step in tl.range(0, PER, num_stages=STAGES):
        # Equal parts need no mask: the compiler drops one that is constant.
        within = True if BLOCKS % SPLIT == 0 else step < count
        vectors = tl.load(right + step * BLOCK_K, mask=present & within, other=0.0)
        weights = tl.load(left + step * BLOCK_K, mask=within, other=0.0)
        sums = tl.dot(weights, vectors, sums, input_precision=precision)
        if SILU:
            weights = tl.load(upper + step * BLOCK_K, mask=within, other=0.0)
            ups = tl.dot(weights, vectors, ups, input_precision=precision)
    done = True
    if SPLIT > 1:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        STRIDE: tl.constexpr = SIZE * 2 if SILU else SIZE
        place = rows[:, None] * BLOCK_M + tokens[None, :]
        mine = partials + tile * (SPLIT * STRIDE) + place
        tl.store(mine + part * STRIDE, sums)
        if SILU:
            tl.store(mine + part * STRIDE + SIZE, ups)
        # Every thread's partial sums before the count that publishes them.
        tl.debug_barrier()
        done = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT - 1
        if done:
            tl.store(counters + tile, 0)
            sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            ups = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for s in tl.static_range(SPLIT):
                # Past the first-level cache, which does not see what other programs wrote.
                sums += tl.load(mine + s * STRIDE, cache_modifier=".cg")
                if SILU:
                    ups += tl.load(mine + s * STRIDE + SIZE, cache_modifier=".cg")
    if done:
        index = first + rows[:, None]
        result = with_bias(sums, bias, index, index < N, HAS_BIAS, dtype)
        if SILU:
            result = silu_mul(result, with_bias(ups, bias + N, index, index < N, HAS_BIAS, dtype))
        tl.store(y + tokens[None, :] * N + index, result, mask=(index < N) & present)


def splitk_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: SplitKPlan,
    partials: Tensor,
    counters: Tensor,
    silu: bool = False,
) -> Tensor:
    """x: [M, K]; weight: [N, K]; bias: [N]; one dtype. Returns [M, N].

    silu: weight and bias hold the gate's rows before the up projection's, and silu(gate) * up is returned, [M, N / 2].
    partials: float32; counters: int32, zero, and zero again afterwards; at least `workspace_size` of each. Calls on one
    stream may share them.
    """
    outputs = weight.shape[0] // 2 if silu else weight.shape[0]
    rows, inputs = x.shape
    assert x.is_contiguous() and weight.is_contiguous() and weight.shape[1] == inputs
    assert inputs % plan.block_k == 0 and plan.split * plan.block_k <= inputs, "K is not divisible so"
    floats, tiles = workspace_size(rows, outputs, plan, silu)
    assert partials.numel() >= floats and counters.numel() >= tiles, "workspace too small"
    y = torch.empty(rows, outputs, device=x.device, dtype=x.dtype)
    pdl = x.is_cuda
    splitk_gemm_kernel[(triton.cdiv(outputs, plan.block_n), plan.split)](
        x,
        weight,
        x if bias is None else bias,
        y,
        partials,
        counters,
        rows,
        outputs,
        K=inputs,
        BLOCK_M=block_rows(rows),
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        SPLIT=plan.split,
        STAGES=plan.stages,
        HAS_BIAS=bias is not None,
        SILU=silu,
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return y
