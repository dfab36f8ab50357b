"""y = x W^T for one row x, as a stream over W; the norm before it and SwiGLU's product after it can be fused.

Such a product is bound by reading W once. Each program owns a contiguous run of W's rows, sums in float32 and needs
no other program, so results are the same from run to run. W never changes, so a program loads the first of its part
before it waits for the kernel that produces x (programmatic dependent launch, see `kernels.norm`): memory stays busy
between kernels. Fusing costs every program the norm of all of x, and is still cheaper than one more kernel to wait for.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.linear.plans import GemvPlan

NO_NORM, NORM, ADD_NORM = 0, 1, 2


@triton.jit
def normalised(x, scales, residual, total, eps, cols, inside, K: tl.constexpr, ADD: tl.constexpr):
    """x, [BLOCK_K] float32, normalised and rounded as the unfused kernels round; ADD as in `gemv_kernel`."""
    dtype: tl.constexpr = x.dtype.element_ty
    wide = tl.load(x + cols, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(residual + cols, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(dtype)
        if tl.program_id(0) == 0:
            tl.store(total + cols, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / K + eps)
    return ((wide * scale).to(dtype).to(tl.float32) * scales.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def with_bias(sums, bias, index, inside, HAS_BIAS: tl.constexpr, dtype: tl.constexpr):
    """Sums as they leave a product: bias added in float32, rounded."""
    if HAS_BIAS:
        sums += tl.load(bias + index, mask=inside, other=0.0).to(tl.float32)
    return sums.to(dtype)


@triton.jit
def silu_mul(gate, up):
    """silu(gate) * up, rounded in between, as `kernels.activation` does."""
    wide = gate.to(tl.float32)
    return ((wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def gemv_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    y,
    total,
    eps,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MODE: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    """x: [K]; weight: [N, K] (SILU: [2 N, K], gate first); y: [N]. A program makes ROWS * TILES elements of y.

    MODE: 1 normalises x first (norm_weight: [K]), 2 adds residual: [K] before that and writes the sum to total: [K].
    """
    dtype: tl.constexpr = y.dtype.element_ty
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first = tl.program_id(0) * (ROWS * TILES)
    last = N - 1 - first
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_K)
    inside = cols < K
    base = weight + first.to(tl.int64) * K
    upper = base + N.to(tl.int64) * K
    # Rows past the end repeat the last one and are not stored. A mask that is constant is dropped by the compiler.
    offsets = tl.minimum(rows, last)[:, None] * K + cols[None, :]
    tile = tl.load(base + offsets, mask=inside[None, :], other=0.0)
    if SILU:
        other = tl.load(upper + offsets, mask=inside[None, :], other=0.0)
    if MODE > 0:
        scales = tl.load(norm_weight + cols, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if MODE > 0:
        vector = normalised(x, scales, residual, total, eps, cols, inside, K, MODE == 2)
    elif STEPS == 1:
        vector = tl.load(x + cols, mask=inside, other=0.0).to(tl.float32)
    for t in tl.static_range(TILES):
        index = first + t * ROWS + rows
        valid = index < N
        if STEPS == 1:
            now = tile.to(tl.float32)
            if SILU:
                also = other.to(tl.float32)
            if t + 1 < TILES:
                offsets = tl.minimum((t + 1) * ROWS + rows, last)[:, None] * K + cols[None, :]
                tile = tl.load(base + offsets, mask=inside[None, :], other=0.0)
                if SILU:
                    other = tl.load(upper + offsets, mask=inside[None, :], other=0.0)
            result = with_bias(tl.sum(now * vector[None, :], 1), bias, index, valid, HAS_BIAS, dtype)
            if SILU:
                up = with_bias(tl.sum(also * vector[None, :], 1), bias + N, index, valid, HAS_BIAS, dtype)
                result = silu_mul(result, up)
        else:
            parts = tl.zeros([ROWS, BLOCK_K], tl.float32)
            for step in tl.static_range(STEPS):
                now = tile.to(tl.float32)
                here = step * BLOCK_K + cols
                if step + 1 < STEPS:
                    ahead = (here + BLOCK_K < K)[None, :]
                    tile = tl.load(base + offsets + (step + 1) * BLOCK_K, mask=ahead, other=0.0)
                parts += now * tl.load(x + here, mask=here < K, other=0.0).to(tl.float32)[None, :]
            result = with_bias(tl.sum(parts, 1), bias, index, valid, HAS_BIAS, dtype)
        tl.store(y + index, result, mask=valid)


def _launch(
    plan: GemvPlan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """Checks what the kernel assumes and runs it; x stands in for tensors that a variant lacks."""
    outputs = weight.shape[0] // 2 if silu else weight.shape[0]
    rows, inputs = x.shape
    assert rows == 1 and x.is_contiguous() and weight.is_contiguous() and weight.shape[1] == inputs
    assert residual is None or residual.is_contiguous()
    plain = not silu and norm_weight is None and plan.tiles == 1
    assert plain or plan.block_k >= inputs, "only whole rows are fused or tiled"
    y = torch.empty(1, outputs, device=x.device, dtype=x.dtype)
    pdl = x.is_cuda
    gemv_kernel[(triton.cdiv(outputs, plan.rows * plan.tiles),)](
        x,
        weight,
        x if bias is None else bias,
        x if norm_weight is None else norm_weight,
        x if residual is None else residual,
        y,
        x if total is None else total,
        eps,
        outputs,
        K=inputs,
        ROWS=plan.rows,
        BLOCK_K=plan.block_k,
        TILES=plan.tiles,
        HAS_BIAS=bias is not None,
        MODE=NO_NORM if norm_weight is None else NORM if residual is None else ADD_NORM,
        SILU=silu,
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return y


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemvPlan) -> Tensor:
    """x: [1, K]; weight: [N, K]; bias: [N]; one dtype, here and below. Returns [1, N]."""
    return _launch(plan, x, weight, bias)


def gemv_silu_mul(x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemvPlan) -> Tensor:
    """silu(x G^T) * (x U^T). weight: [2 N, K], G before U; bias: [2 N]; plan.block_k >= K. Returns [1, N]."""
    return _launch(plan, x, weight, bias, silu=True)


def norm_gemv(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None, plan: GemvPlan, silu: bool = False
) -> Tensor:
    """`gemv` (silu: `gemv_silu_mul`) of rms_norm(x). norm_weight: [K]; plan.block_k >= K."""
    return _launch(plan, x, weight, bias, norm_weight, eps, silu=silu)


def add_norm_gemv(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    plan: GemvPlan,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `norm_gemv`, of rms_norm(x + residual). residual: [1, K]. Returns the product and the sum, [1, K]."""
    total = torch.empty_like(x)
    return _launch(plan, x, weight, bias, norm_weight, eps, residual, total, silu), total
