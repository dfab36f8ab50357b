"""GEMV y = x W^T for 1 to 4 rows x, streaming W.

RMSNorm before it and a gated activation after it can be fused.

A GEMV is bound by reading W once. Each program owns contiguous rows of W, accumulates in float32 and needs no other
program, so results are deterministic. W never changes, so a program loads the start of its part before it waits for the
kernel that produces x (see `kernels.dependent_launch`): memory stays busy between kernels. With a fused norm every
program normalizes all of x, which is still cheaper than waiting for one more kernel. Several rows of x are multiplied
with each tile of W in registers, which reads W once, but takes an instruction for each weight and row. More than four
rows of x do not fit in registers.

A program holds whole rows, in one block, or in chunks if their length is far below a power of two: one block of 4096
elements for 2560 inputs wastes more than a third of its registers and instructions, so that fewer programs fit on an
SM. Long rows without a gate or a norm are read in steps. Oracles: `torch.nn.functional.linear`, those of `norm`, and
`reference.layer.gated_activation`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# ruff: noqa: N803, N806, RUF005

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gated_activation import activated
from tandem.engine_core.kernels.lora.low_rank_update import (
    LowRankUpdate,
    first_row_b,
    row_updates,
    update_constants,
    wait_for_inputs,
    wait_for_update,
)
from tandem.engine_core.kernels.norm import normalize
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan
from tandem.engine_core.kernels.tiles.table import FEW_ROWS

NO_NORM, NORM, ADD_NORM, NORM_ADD_NORM = 0, 1, 2, 3
LANES = tl.constexpr(8)
"""Adjacent elements of a weight row that a thread loads at once, 16 bytes of 16-bit weights."""


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
def _load_chunks(row_ptr, offs, mask, K: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the chunks of one row. offs: of the first, [BLOCK_K]; mask: of a single chunk."""
    found = ()
    for chunk in tl.static_range(CHUNKS):
        at = offs + chunk * BLOCK_K
        if CHUNKS == 1:
            found = found + (tl.load(row_ptr + offs, mask=mask, other=0.0),)
        elif (chunk + 1) * BLOCK_K <= K:
            found = found + (tl.load(row_ptr + at),)
        else:
            found = found + (tl.load(row_ptr + at, mask=at < K, other=0.0),)
    return found


@triton.jit
def _load_row_chunks(base_ptr, row_offs, offs, mask, K: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the chunks of weight rows.

    row_offs: of the first chunk, [ROWS, BLOCK_K]; offs, mask: as in `_load_chunks`.
    """
    found = ()
    for chunk in tl.static_range(CHUNKS):
        if CHUNKS == 1:
            found = found + (tl.load(base_ptr + row_offs, mask=mask[None, :], other=0.0),)
        elif (chunk + 1) * BLOCK_K <= K:
            found = found + (tl.load(base_ptr + row_offs + chunk * BLOCK_K),)
        else:
            inside = (chunk * BLOCK_K + offs < K)[None, :]
            found = found + (tl.load(base_ptr + row_offs + chunk * BLOCK_K, mask=inside, other=0.0),)
    return found


@triton.jit
def _wide(chunks, CHUNKS: tl.constexpr):
    found = ()
    for chunk in tl.static_range(CHUNKS):
        found = found + (chunks[chunk].to(tl.float32),)
    return found


@triton.jit
def _normalized(chunks, weights, eps, K: tl.constexpr, CHUNKS: tl.constexpr, dtype: tl.constexpr):
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
def _add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _row_sums(parts, TOKENS: tl.constexpr):
    """Return the sums of each tile's rows, [ROWS] each. parts: TOKENS tiles, four of which share their barriers."""
    # Triton needs one type for all returns, so no `if` with two.
    sums = (tl.sum(parts[0], 1),) if TOKENS == 1 else tl.reduce(parts, 1, _add_four)
    return sums


@triton.jit
def _dot_products(rows, vectors, CHUNKS: tl.constexpr, TOKENS: tl.constexpr):
    """Return the dot products of weight rows and each vector, [ROWS] float32 each."""
    parts = ()
    for token in tl.static_range(TOKENS):
        sums = rows[0].to(tl.float32) * vectors[token][0][None, :]
        for chunk in tl.static_range(1, CHUNKS):
            sums += rows[chunk].to(tl.float32) * vectors[token][chunk][None, :]
        parts = parts + (sums,)
    return _row_sums(parts, TOKENS)


@triton.jit
def input_vector(
    x_ptr,
    residual_ptr,
    total_ptr,
    stores,
    x_weight_ptr,
    norm_weight_ptr,
    x_weight,
    norm_weight,
    eps,
    offs_k,
    mask_k,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MODE: tl.constexpr,
):
    """Return a row of x in chunks of float32, after the additions and norms of a MODE of `gemv_kernel`.

    stores: whether to write the sum to total; x_weight, norm_weight: loaded before, if there is only one chunk.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    vector = _wide(_load_chunks(x_ptr, offs_k, mask_k, K, CHUNKS, BLOCK_K), CHUNKS)
    if MODE == 3:
        # In registers before the wait, the weights of several chunks would cost a concurrent program.
        if CHUNKS > 1:
            x_weight = _load_chunks(x_weight_ptr, offs_k, mask_k, K, CHUNKS, BLOCK_K)
        vector = _normalized(vector, x_weight, eps, K, CHUNKS, dtype)
    if MODE >= 2:
        residual = _load_chunks(residual_ptr, offs_k, mask_k, K, CHUNKS, BLOCK_K)
        stream = ()
        for chunk in tl.static_range(CHUNKS):
            total = (vector[chunk] + residual[chunk].to(tl.float32)).to(dtype)
            if stores:
                at = chunk * BLOCK_K + offs_k
                tl.store(total_ptr + at, total, mask=mask_k if CHUNKS == 1 else at < K)
            stream = stream + (total.to(tl.float32),)
        vector = stream
    if MODE > 0:
        if CHUNKS > 1:
            norm_weight = _load_chunks(norm_weight_ptr, offs_k, mask_k, K, CHUNKS, BLOCK_K)
        vector = _normalized(vector, norm_weight, eps, K, CHUNKS, dtype)
    return vector


@triton.jit
def _step_sums(weights, x, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Multiply the weights of a step, [ROWS, BLOCK_K] float32, by those of a row of x, [BLOCK_K].

    With several rows of x a thread adds its LANES products, as accumulators of all elements would fill its registers.
    """
    products = weights * x.to(tl.float32)[None, :]
    if TOKENS > 1:
        products = tl.sum(tl.reshape(products, [ROWS, BLOCK_K // LANES, LANES]), 2)
    return products


@triton.jit(do_not_specialize=["M"])
def gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    x_weight_ptr,
    norm_weight_ptr,
    residual_ptr,
    y_ptr,
    total_ptr,
    sums_ptr,
    b_ptr,
    ranks_ptr,
    slots_ptr,
    eps,
    M,
    N,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    START1: tl.constexpr,
    START2: tl.constexpr,
    START3: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    TERMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply up to TOKENS rows by a transposed weight, with optional fused steps.

    x: [M, K]; weight: [N, K] ([2 N, K] with an ACTIVATION, gate first); y: [M, N]. Rows past M repeat the last one and
    are not stored.

    A program computes ROWS * TILES columns of y. MODE: 1 normalizes x first (norm_weight: [K]); 2 adds residual: [M, K]
    before that and writes the sum to total: [M, K]; 3 normalizes x (x_weight: [K]) before the addition. PARTS: above 0
    adds updates of adapters; their arguments are those of `row_updates`.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    GATED: tl.constexpr = ACTIVATION > 0
    first = tl.program_id(0) * (ROWS * TILES)
    last = N - 1 - first
    rows = tl.arange(0, ROWS)
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    base_ptr = weight_ptr + first.to(tl.int64) * K
    upper_ptr = base_ptr + N.to(tl.int64) * K
    outputs = 2 * N if GATED else N
    tensors = (sums_ptr, b_ptr, ranks_ptr, slots_ptr)
    sizes: tl.constexpr = (START1, START2, START3, PARTS, MAX_RANK, TERMS)
    # Rows past the end repeat the last one and are not stored.
    offs = tl.minimum(rows, last)[:, None] * K + offs_k[None, :]
    if MODE == 0 and CHUNKS > 1:
        tile = tl.load(base_ptr + offs, mask=mask_k[None, :], other=0.0)
        first_b = first_row_b(tensors, sizes, first + rows, first + rows < N, M, outputs, TOKENS)
        wait_for_inputs(PARTS, PDL)
        offs_n = first + rows
        mask_n = offs_n < N
        SUMS: tl.constexpr = BLOCK_K if TOKENS == 1 else BLOCK_K // LANES
        parts = ()
        for _ in tl.static_range(TOKENS):
            parts = parts + (tl.zeros([ROWS, SUMS], tl.float32),)
        for step in tl.static_range(CHUNKS):
            now = tile.to(tl.float32)
            offs_step = step * BLOCK_K + offs_k
            if step + 1 < CHUNKS:
                ahead = (offs_step + BLOCK_K < K)[None, :]
                tile = tl.load(base_ptr + offs + (step + 1) * BLOCK_K, mask=ahead, other=0.0)
            added = ()
            for token in tl.static_range(TOKENS):
                row_ptr = x_ptr if TOKENS == 1 else x_ptr + tl.minimum(token, M - 1) * K
                x = tl.load(row_ptr + offs_step, mask=offs_step < K, other=0.0)
                added = added + (parts[token] + _step_sums(now, x, TOKENS, ROWS, BLOCK_K),)
            parts = added
        sums = _row_sums(parts, TOKENS)
        wait_for_update(PARTS, PDL)
        updates = row_updates(tensors, sizes, first_b, offs_n, mask_n, M, outputs, TOKENS)
        for token in tl.static_range(TOKENS):
            total = sums[token] if PARTS == 0 else sums[token] + updates[token]
            result = add_bias(total, bias_ptr, offs_n, mask_n, HAS_BIAS, dtype)
            stored = mask_n if TOKENS == 1 else mask_n & (token < M)
            tl.store(y_ptr + token * N + offs_n, result, mask=stored)
        return
    tile = _load_row_chunks(base_ptr, offs, offs_k, mask_k, K, CHUNKS, BLOCK_K)
    if GATED:
        upper_tile = _load_row_chunks(upper_ptr, offs, offs_k, mask_k, K, CHUNKS, BLOCK_K)
    norm_weight = ()
    x_weight = ()
    if MODE > 0 and CHUNKS == 1:
        norm_weight = _load_chunks(norm_weight_ptr, offs_k, mask_k, K, CHUNKS, BLOCK_K)
    if MODE == 3 and CHUNKS == 1:
        x_weight = _load_chunks(x_weight_ptr, offs_k, mask_k, K, CHUNKS, BLOCK_K)
    first_b = first_row_b(tensors, sizes, first + rows, first + rows < N, M, outputs, TOKENS)
    if GATED:
        first_up_b = first_row_b(tensors, sizes, N + first + rows, first + rows < N, M, outputs, TOKENS)
    wait_for_inputs(PARTS, PDL)
    vectors = ()
    for token in tl.static_range(TOKENS):
        at = 0 if TOKENS == 1 else tl.minimum(token, M - 1) * K
        vector = input_vector(
            x_ptr + at,
            residual_ptr + at,
            total_ptr + at,
            tl.program_id(0) == 0 if TOKENS == 1 else (tl.program_id(0) == 0) & (token < M),
            x_weight_ptr,
            norm_weight_ptr,
            x_weight,
            norm_weight,
            eps,
            offs_k,
            mask_k,
            K,
            CHUNKS,
            BLOCK_K,
            MODE,
        )
        vectors = vectors + (vector,)
    for t in tl.static_range(TILES):
        offs_n = first + t * ROWS + rows
        mask_n = offs_n < N
        # Several chunks are converted one by one.
        now = _wide(tile, CHUNKS) if CHUNKS == 1 else tile
        if GATED:
            also = _wide(upper_tile, CHUNKS) if CHUNKS == 1 else upper_tile
        if t + 1 < TILES:
            offs = tl.minimum((t + 1) * ROWS + rows, last)[:, None] * K + offs_k[None, :]
            tile = _load_row_chunks(base_ptr, offs, offs_k, mask_k, K, CHUNKS, BLOCK_K)
            if GATED:
                upper_tile = _load_row_chunks(upper_ptr, offs, offs_k, mask_k, K, CHUNKS, BLOCK_K)
        sums = _dot_products(now, vectors, CHUNKS, TOKENS)
        if GATED:
            ups = _dot_products(also, vectors, CHUNKS, TOKENS)
        if t == 0:
            wait_for_update(PARTS, PDL)
        # After the dot products, when the registers of the tiles are free.
        updates = row_updates(tensors, sizes, first_b, offs_n, mask_n, M, outputs, TOKENS)
        if GATED:
            up_updates = row_updates(tensors, sizes, first_up_b, N + offs_n, mask_n, M, outputs, TOKENS)
        if t + 1 < TILES:
            next_n = offs_n + ROWS
            first_b = first_row_b(tensors, sizes, next_n, next_n < N, M, outputs, TOKENS)
            if GATED:
                first_up_b = first_row_b(tensors, sizes, N + next_n, next_n < N, M, outputs, TOKENS)
        for token in tl.static_range(TOKENS):
            total = sums[token] if PARTS == 0 else sums[token] + updates[token]
            result = add_bias(total, bias_ptr, offs_n, mask_n, HAS_BIAS, dtype)
            if GATED:
                total = ups[token] if PARTS == 0 else ups[token] + up_updates[token]
                up = add_bias(total, bias_ptr + N, offs_n, mask_n, HAS_BIAS, dtype)
                result = apply_gate(result, up, ACTIVATION)
            stored = mask_n if TOKENS == 1 else mask_n & (token < M)
            tl.store(y_ptr + token * N + offs_n, result, mask=stored)


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: GemvPlan,
    activation: Activation | None = None,
    pdl: bool = False,
    out: Tensor | None = None,
    update: LowRankUpdate | None = None,
) -> Tensor:
    """Return the GEMV of 1 to 4 rows and a weight, optionally gated.

    The result is x W^T + b, [M, N], or activation(x G^T) * (x U^T) for a fused gate and up projection.

    x: [M, K]; weight: [N, K], with an activation [2 N, K], G before U, and plan.block_k >= K; bias: [N] or [2 N]. x,
    weight and bias have one dtype, here and below. out: output tensor, contiguous; update: added before the bias, here
    and below. With `pdl` the preceding kernel may write everything but the weights; with an update it is the launch
    that multiplied x by A.
    """
    plain, inputs = activation is None and plan.tiles == 1, weight.shape[1]
    assert plain or plan.block_k >= inputs, f"block_k {plan.block_k} must hold whole rows of {inputs} if gated or tiled"
    return _launch(x, None, None, None, 0.0, weight, bias, plan, activation, pdl, out, update)[0]


def normed_gemv(
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
    update: LowRankUpdate | None = None,
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, and return `gemv` of the sum's norm, and the sum, [M, K].

    x, residual: [M, K]; without a residual the sum is x itself. x_weight: weight of a norm of x before the addition,
    [K], as in `norm.norm_add_rms_norm`; norm_weight: [K]; both in x's dtype or float32. A program holds a row in chunks
    of plan.block_k elements. With `pdl` the preceding kernel may write x and the residual.
    """
    assert x_weight is None or residual is not None, "x_weight needs a residual"
    return _launch(x, residual, x_weight, norm_weight, eps, weight, bias, plan, activation, pdl, None, update)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    x_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    plan: GemvPlan,
    activation: Activation | None,
    pdl: bool,
    out: Tensor | None,
    update: LowRankUpdate | None,
) -> tuple[Tensor, Tensor]:
    """Check the kernel's preconditions and launch it.

    x is passed for tensors that a variant does not use.
    """
    outputs = weight.shape[0] if activation is None else weight.shape[0] // 2
    rows, inputs = x.shape
    assert 1 <= rows <= FEW_ROWS, f"a GEMV computes up to {FEW_ROWS} rows, not {rows}"
    assert x.is_contiguous() and weight.is_contiguous() and weight.shape[1] == inputs
    assert residual is None or residual.is_contiguous()
    y = torch.empty(rows, outputs, device=x.device, dtype=x.dtype) if out is None else out
    assert y.is_contiguous() and y.shape == (rows, outputs), f"a result of {tuple(y.shape)} for {rows} by {outputs}"
    total = x if residual is None else torch.empty_like(x)
    gemv_kernel[(triton.cdiv(outputs, plan.rows * plan.tiles),)](
        *(x, weight, *(x if given is None else given for given in (bias, x_weight, norm_weight, residual))),
        *(y, total),
        *((x, x, x, x) if update is None else update.row_tensors),
        *(eps, rows, outputs),
        K=inputs,
        TOKENS=1 if rows == 1 else FEW_ROWS,
        ROWS=plan.rows,
        BLOCK_K=plan.block_k,
        TILES=plan.tiles,
        HAS_BIAS=bias is not None,
        MODE=input_mode(norm_weight, residual, x_weight),
        ACTIVATION=0 if activation is None else activation.value,
        **update_constants(update),
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return y, total


def input_mode(norm_weight: Tensor | None, residual: Tensor | None, x_weight: Tensor | None) -> int:
    if norm_weight is None:
        return NO_NORM
    if residual is None:
        return NORM
    return ADD_NORM if x_weight is None else NORM_ADD_NORM
