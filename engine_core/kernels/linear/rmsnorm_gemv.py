"""GEMV y = x W^T for one row, fused with the norm before it, processed in chunks.

It is for row lengths far below a power of two. `gemv` holds a row as one power-of-two block: 4096 elements for 2560
inputs, which wastes more than a third of its registers and instructions, so fewer programs fit on an SM. Here every
thread loads 16 bytes of each chunk. Norm weights are loaded after the wait for x, since holding them in registers
earlier would also cost a program. Otherwise it is like `gemv`, for 16-bit weights. Oracles: those of `norm`,
`torch.nn.functional.linear` and `reference.layer.gated_activation`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# ruff: noqa: N803, N806, RUF005

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.linear.gemv import add_bias, add_norm_gemv, apply_gate, input_mode, norm_gemv
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan


@triton.jit
def _load_chunks(row_ptr, offs, K: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the chunks of one row."""
    found = ()
    for chunk in tl.static_range(CHUNKS):
        at = offs + chunk * BLOCK_K
        if (chunk + 1) * BLOCK_K <= K:
            found = found + (tl.load(row_ptr + at),)
        else:
            found = found + (tl.load(row_ptr + at, mask=at < K, other=0.0),)
    return found


@triton.jit
def _wide(chunks, CHUNKS: tl.constexpr):
    found = ()
    for chunk in tl.static_range(CHUNKS):
        found = found + (chunks[chunk].to(tl.float32),)
    return found


@triton.jit
def _normalised(chunks, weights, eps, K: tl.constexpr, CHUNKS: tl.constexpr, dtype: tl.constexpr):
    """Return the norm of a row in float32.

    Rounds like `norm.normalize`. chunks: float32, 0 past K.
    """
    squares = chunks[0] * chunks[0]
    for chunk in tl.static_range(1, CHUNKS):
        squares += chunks[chunk] * chunks[chunk]
    inverse = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    found = ()
    for chunk in tl.static_range(CHUNKS):
        weight = weights[chunk]
        quotient = (chunks[chunk] * inverse).to(weight.dtype).to(tl.float32)
        found = found + ((quotient * weight.to(tl.float32)).to(dtype).to(tl.float32),)
    return found


@triton.jit
def _products(rows, vector, CHUNKS: tl.constexpr):
    """Return the dot products of weight rows and a vector, [ROWS] float32."""
    sums = rows[0].to(tl.float32) * vector[0][None, :]
    for chunk in tl.static_range(1, CHUNKS):
        sums += rows[chunk].to(tl.float32) * vector[chunk][None, :]
    return tl.sum(sums, 1)


@triton.jit
def rmsnorm_gemv_kernel(
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
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize one row and multiply it by a transposed weight.

    Arguments as in `gemv_kernel`.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    GATED: tl.constexpr = ACTIVATION > 0
    first = tl.program_id(0) * (ROWS * TILES)
    last = N - 1 - first
    rows = tl.arange(0, ROWS)
    offs = tl.arange(0, BLOCK_K)
    base_ptr = weight_ptr + first.to(tl.int64) * K
    upper_ptr = base_ptr + N.to(tl.int64) * K
    # Rows past the end repeat the last one and are not stored.
    row_offs = tl.minimum(rows, last)[:, None] * K + offs[None, :]
    tile = _load_row_chunks(base_ptr, row_offs, offs, K, CHUNKS, BLOCK_K)
    if GATED:
        upper_tile = _load_row_chunks(upper_ptr, row_offs, offs, K, CHUNKS, BLOCK_K)
    wait_for_previous(PDL)
    vector = _wide(_load_chunks(x_ptr, offs, K, CHUNKS, BLOCK_K), CHUNKS)
    if MODE == 3:
        vector = _normalised(vector, _load_chunks(x_weight_ptr, offs, K, CHUNKS, BLOCK_K), eps, K, CHUNKS, dtype)
    if MODE >= 2:
        residual = _load_chunks(residual_ptr, offs, K, CHUNKS, BLOCK_K)
        stream = ()
        for chunk in tl.static_range(CHUNKS):
            total = (vector[chunk] + residual[chunk].to(tl.float32)).to(dtype)
            if tl.program_id(0) == 0:
                at = chunk * BLOCK_K + offs
                tl.store(total_ptr + at, total, mask=at < K)
            stream = stream + (total.to(tl.float32),)
        vector = stream
    vector = _normalised(vector, _load_chunks(norm_weight_ptr, offs, K, CHUNKS, BLOCK_K), eps, K, CHUNKS, dtype)
    for t in tl.static_range(TILES):
        offs_n = first + t * ROWS + rows
        mask_n = offs_n < N
        now = tile
        if GATED:
            also = upper_tile
        if t + 1 < TILES:
            row_offs = tl.minimum((t + 1) * ROWS + rows, last)[:, None] * K + offs[None, :]
            tile = _load_row_chunks(base_ptr, row_offs, offs, K, CHUNKS, BLOCK_K)
            if GATED:
                upper_tile = _load_row_chunks(upper_ptr, row_offs, offs, K, CHUNKS, BLOCK_K)
        result = add_bias(_products(now, vector, CHUNKS), bias_ptr, offs_n, mask_n, HAS_BIAS, dtype)
        if GATED:
            up = add_bias(_products(also, vector, CHUNKS), bias_ptr + N, offs_n, mask_n, HAS_BIAS, dtype)
            result = apply_gate(result, up, ACTIVATION)
        tl.store(y_ptr + offs_n, result, mask=mask_n)


@triton.jit
def _load_row_chunks(base_ptr, row_offs, offs, K: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the chunks of weight rows.

    offs: of the first chunk, [ROWS, BLOCK_K].
    """
    found = ()
    for chunk in tl.static_range(CHUNKS):
        if (chunk + 1) * BLOCK_K <= K:
            found = found + (tl.load(base_ptr + row_offs + chunk * BLOCK_K),)
        else:
            inside = (chunk * BLOCK_K + offs < K)[None, :]
            found = found + (tl.load(base_ptr + row_offs + chunk * BLOCK_K, mask=inside, other=0.0),)
    return found


def rmsnorm_gemv(
    x: Tensor,
    residual: Tensor | None,
    x_weight: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    plan: GemvPlan,
    activation: Activation | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, and multiply the norm of the sum by a weight.

    Returns the matmul, [1, N], and the sum, [1, K].

    x, residual: [1, K]; without a residual the sum is x itself. x_weight: weight of a norm of x before the addition,
    [K]; norm_weight: [K]; both in x's dtype or float32. weight: [N, K], with an activation [2 N, K], the gate's rows
    first; bias: [N] or [2 N]. plan.block_k: elements per chunk. With `pdl` the preceding kernel may write x and the
    residual.
    """
    outputs = weight.shape[0] if activation is None else weight.shape[0] // 2
    rows, inputs = x.shape
    assert rows == 1 and x.is_contiguous() and weight.is_contiguous() and weight.shape[1] == inputs
    assert residual is None or residual.is_contiguous()
    assert x_weight is None or residual is not None, "x_weight needs a residual"
    y = torch.empty(1, outputs, device=x.device, dtype=x.dtype)
    total = x if residual is None else torch.empty_like(x)
    rmsnorm_gemv_kernel[(triton.cdiv(outputs, plan.rows * plan.tiles),)](
        x,
        weight,
        x if bias is None else bias,
        x if x_weight is None else x_weight,
        norm_weight,
        x if residual is None else residual,
        y,
        total,
        eps,
        outputs,
        K=inputs,
        ROWS=plan.rows,
        BLOCK_K=plan.block_k,
        CHUNKS=triton.cdiv(inputs, plan.block_k),
        TILES=plan.tiles,
        HAS_BIAS=bias is not None,
        MODE=input_mode(norm_weight, residual, x_weight),
        ACTIVATION=0 if activation is None else activation.value,
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return y, total


def normed_product(
    x: Tensor,
    residual: Tensor | None,
    x_weight: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    plan: GemvPlan,
    activation: Activation | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the result of `rmsnorm_gemv`, using the kernel of the plan.

    This is `gemv` if the plan's block holds a whole row.
    """
    if plan.block_k < weight.shape[1]:
        return rmsnorm_gemv(x, residual, x_weight, norm_weight, eps, weight, bias, plan, activation, pdl)
    if residual is None:
        return norm_gemv(x, norm_weight, eps, weight, bias, plan, activation, pdl), x
    return add_norm_gemv(x, residual, norm_weight, eps, weight, bias, plan, activation, pdl, x_weight)
