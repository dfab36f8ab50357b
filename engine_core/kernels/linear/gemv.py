"""GEMV y = x W^T for one row x, streaming W.

RMSNorm before it and a gated activation after it can be fused.

A GEMV is bound by reading W once. Each program owns contiguous rows of W, accumulates in float32 and needs no other
program, so results are deterministic. W never changes, so a program loads the start of its part before it waits for the
kernel that produces x (see `kernels.dependent_launch`): memory stays busy between kernels. With a fused norm every
program normalizes all of x, which is still cheaper than waiting for one more kernel.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.gated_activation import activated
from tandem.engine_core.kernels.norm import normalize
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan

NO_NORM, NORM, ADD_NORM, NORM_ADD_NORM = 0, 1, 2, 3


@triton.jit
def normed_input(
    x_ptr,
    x_weight,
    norm_weight,
    residual_ptr,
    total_ptr,
    eps,
    offs_k,
    mask_k,
    K: tl.constexpr,
    MODE: tl.constexpr,
):
    """Normalize x for a MODE of `gemv_kernel` above 0.

    Rounds like the kernels of `norm`. x_weight, norm_weight: [BLOCK_K], as stored. Returns [BLOCK_K] float32.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    wide = tl.load(x_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    if MODE == 3:
        wide = normalize(wide, x_weight, eps, K, dtype).to(tl.float32)
    if MODE >= 2:
        wide += tl.load(residual_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32)
        rounded = wide.to(dtype)
        if tl.program_id(0) == 0:
            tl.store(total_ptr + offs_k, rounded, mask=mask_k)
        wide = rounded.to(tl.float32)
    return normalize(wide, norm_weight, eps, K, dtype).to(tl.float32)


@triton.jit
def add_bias(sums, bias_ptr, offs_n, mask_n, HAS_BIAS: tl.constexpr, dtype: tl.constexpr):
    """Add the bias in float32, and round."""
    if HAS_BIAS:
        sums += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    return sums.to(dtype)


@triton.jit
def apply_gate(gate, up, ACTIVATION: tl.constexpr):
    """Return activation(gate) * up.

    The activation is rounded before the multiplication, as in `kernels.gated_activation`.
    """
    active = activated(gate.to(tl.float32), ACTIVATION)
    return (active.to(gate.dtype).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    x_weight_ptr,
    norm_weight_ptr,
    residual_ptr,
    y_ptr,
    total_ptr,
    eps,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply one row by a transposed weight, with optional fused steps.

    x: [K]; weight: [N, K] ([2 N, K] with an ACTIVATION, gate first); y: [N].

    A program computes ROWS * TILES elements of y. MODE: 1 normalizes x first (norm_weight: [K]); 2 adds residual: [K]
    before that and writes the sum to total: [K]; 3 normalizes x (x_weight: [K]) before the addition.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    GATED: tl.constexpr = ACTIVATION > 0
    first = tl.program_id(0) * (ROWS * TILES)
    last = N - 1 - first
    rows = tl.arange(0, ROWS)
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    base_ptr = weight_ptr + first.to(tl.int64) * K
    upper_ptr = base_ptr + N.to(tl.int64) * K
    # Rows past the end repeat the last one and are not stored. The compiler removes a constant mask.
    offs = tl.minimum(rows, last)[:, None] * K + offs_k[None, :]
    tile = tl.load(base_ptr + offs, mask=mask_k[None, :], other=0.0)
    if GATED:
        upper_tile = tl.load(upper_ptr + offs, mask=mask_k[None, :], other=0.0)
    if MODE > 0:
        norm_weight = tl.load(norm_weight_ptr + offs_k, mask=mask_k, other=0.0)
        x_weight = norm_weight
    if MODE == 3:
        x_weight = tl.load(x_weight_ptr + offs_k, mask=mask_k, other=0.0)
    wait_for_previous(PDL)
    if MODE > 0:
        vector = normed_input(x_ptr, x_weight, norm_weight, residual_ptr, total_ptr, eps, offs_k, mask_k, K, MODE)
    elif STEPS == 1:
        vector = tl.load(x_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    for t in tl.static_range(TILES):
        offs_n = first + t * ROWS + rows
        mask_n = offs_n < N
        if STEPS == 1:
            now = tile.to(tl.float32)
            if GATED:
                also = upper_tile.to(tl.float32)
            if t + 1 < TILES:
                offs = tl.minimum((t + 1) * ROWS + rows, last)[:, None] * K + offs_k[None, :]
                tile = tl.load(base_ptr + offs, mask=mask_k[None, :], other=0.0)
                if GATED:
                    upper_tile = tl.load(upper_ptr + offs, mask=mask_k[None, :], other=0.0)
            result = add_bias(tl.sum(now * vector[None, :], 1), bias_ptr, offs_n, mask_n, HAS_BIAS, dtype)
            if GATED:
                up = add_bias(tl.sum(also * vector[None, :], 1), bias_ptr + N, offs_n, mask_n, HAS_BIAS, dtype)
                result = apply_gate(result, up, ACTIVATION)
        else:
            parts = tl.zeros([ROWS, BLOCK_K], tl.float32)
            for step in tl.static_range(STEPS):
                now = tile.to(tl.float32)
                offs_step = step * BLOCK_K + offs_k
                if step + 1 < STEPS:
                    ahead = (offs_step + BLOCK_K < K)[None, :]
                    tile = tl.load(base_ptr + offs + (step + 1) * BLOCK_K, mask=ahead, other=0.0)
                parts += now * tl.load(x_ptr + offs_step, mask=offs_step < K, other=0.0).to(tl.float32)[None, :]
            result = add_bias(tl.sum(parts, 1), bias_ptr, offs_n, mask_n, HAS_BIAS, dtype)
        tl.store(y_ptr + offs_n, result, mask=mask_n)


def _launch(
    plan: GemvPlan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    pdl: bool,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    x_weight: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Check the kernel's preconditions and launch it.

    x is passed for tensors that a variant does not use.
    """
    outputs = weight.shape[0] if activation is None else weight.shape[0] // 2
    rows, inputs = x.shape
    assert rows == 1 and x.is_contiguous() and weight.is_contiguous() and weight.shape[1] == inputs
    assert residual is None or residual.is_contiguous()
    plain = activation is None and norm_weight is None and plan.tiles == 1
    assert plain or plan.block_k >= inputs, f"block_k {plan.block_k} must hold whole rows of {inputs} if fused or tiled"
    y = torch.empty(1, outputs, device=x.device, dtype=x.dtype) if out is None else out
    assert y.is_contiguous() and y.shape == (1, outputs), f"a result of {tuple(y.shape)} for 1 by {outputs}"
    gemv_kernel[(triton.cdiv(outputs, plan.rows * plan.tiles),)](
        x,
        weight,
        x if bias is None else bias,
        x if x_weight is None else x_weight,
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
        MODE=input_mode(norm_weight, residual, x_weight),
        ACTIVATION=0 if activation is None else activation.value,
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return y


def input_mode(norm_weight: Tensor | None, residual: Tensor | None, x_weight: Tensor | None) -> int:
    if norm_weight is None:
        return NO_NORM
    if residual is None:
        return NORM
    return ADD_NORM if x_weight is None else NORM_ADD_NORM


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: GemvPlan,
    activation: Activation | None = None,
    pdl: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return the GEMV of one row and a weight, optionally gated.

    The result is x W^T + b, [1, N], or activation(x G^T) * (x U^T) for a fused gate and up projection.

    x: [1, K]; weight: [N, K], with an activation [2 N, K], G before U, and plan.block_k >= K; bias: [N] or [2 N]. x,
    weight and bias have one dtype, here and below. out: output tensor, contiguous. With `pdl` the preceding kernel may
    write everything but the weights.
    """
    return _launch(plan, x, weight, bias, activation, pdl, out=out)


def norm_gemv(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    plan: GemvPlan,
    activation: Activation | None = None,
    pdl: bool = False,
) -> Tensor:
    """Return `gemv` of rms_norm(x).

    norm_weight: [K], in x's dtype or float32; plan.block_k >= K.
    """
    return _launch(plan, x, weight, bias, activation, pdl, norm_weight, eps)


def add_norm_gemv(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    plan: GemvPlan,
    activation: Activation | None = None,
    pdl: bool = False,
    x_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `norm_gemv` of x + residual, and that sum, [1, K].

    residual: [1, K]; x_weight: weight of a norm of x before the addition, [K], as in `norm.norm_add_rms_norm`.
    """
    total = torch.empty_like(x)
    y = _launch(plan, x, weight, bias, activation, pdl, norm_weight, eps, residual, total, x_weight)
    return y, total
