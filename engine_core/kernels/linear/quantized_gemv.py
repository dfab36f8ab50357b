"""GEMV y = x W^T for one row x and an 8-bit or int4 weight W.

As in `kernels.linear.gemv`, each program owns contiguous rows of W, accumulates in float32, and can fuse RMSNorm before
and a gated activation after the GEMV. W is read in 32-bit words of four 8-bit or eight int4 values (`packed_dot`). The
loop iterates over tiles of rows, or over the inputs of one tile, and prefetches the next iteration.

Int4 columns sorted by group (act-order) come with their order, by which each program permutes x. No kernel writes the
order, so it is loaded before the wait for the kernel that produces x.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.linear.eight_bit_weights import scale_group, scale_height
from tandem.engine_core.kernels.linear.gemv import add_bias, apply_gate, input_mode, normed_input
from tandem.engine_core.kernels.linear.int4_layout import PER_WORD, group_and_run
from tandem.engine_core.kernels.linear.packed_dot import (
    FP8,
    FP8_BITS,
    INT4,
    INT8,
    packed_dot,
    prepare_inputs,
    words_per_sum,
)
from tandem.engine_core.kernels.linear.quantized_plans import SCALE_ROWS
from tandem.engine_core.kernels.tiles.plan_types import INT4_STRIDE, GemvPlan

_KINDS = {torch.float8_e4m3fn: FP8, torch.int8: INT8, torch.uint8: FP8_BITS}
_BYTES_A_WORD = 4
_SPAN = 4
"""Words per vector load of a thread. For int4 their inputs are those of a whole block of `int4_layout`, and share a
scale if a group has as many inputs."""


@triton.jit
def load_tile(
    word_ptr,
    scale_ptr,
    zero_ptr,
    first,
    step,
    end,
    height,
    within,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Load one step of a tile.

    Returns words, [ROWS, words], and for int4 the scales and zero points of their spans, [ROWS, spans]; for 8-bit
    weights scalar placeholders. first: row of the weight; end: first row that is not loaded; height: rows of the
    weight; within: whether to load.
    """
    PER: tl.constexpr = 8 if KIND == 0 else 4
    WORDS: tl.constexpr = BLOCK_K // PER
    row = tl.arange(0, ROWS)
    inside = ((first + row < end) & within)[:, None]
    word = step * WORDS + tl.arange(0, WORDS)
    mask = inside
    if K % BLOCK_K != 0:
        mask = inside & (word < K // PER)[None, :]
    offs = row[:, None] * (K // PER) + word[None, :]
    words = tl.load(word_ptr + first.to(tl.int64) * (K // PER) + offs, mask=mask, other=0)
    scales, zeros = tl.full([], 1.0, tl.float32), tl.full([], 0, tl.int32)
    if KIND == 0:
        span = step * WORDS + tl.arange(0, WORDS // SPAN) * SPAN
        mask = inside
        if K % BLOCK_K != 0:
            mask = inside & (span < K // PER)[None, :]
        column = span // (4 * RUN) * (32 * RUN) + span % RUN * 32
        # Scales and zero points of a group are contiguous.
        offs = (column // GROUP)[None, :] * height + (first + row)[:, None]
        scales = tl.load(scale_ptr + offs, mask=mask, other=0.0)
        zeros = tl.load(zero_ptr + offs, mask=mask, other=0)
    return words, scales, zeros


@triton.jit
def current_scales(
    scales,
    scale_ptr,
    first,
    step,
    end,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    HEIGHT: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Return the scales of one step of a tile, right before its dot products.

    Those of int4 come from `load_tile`; 8-bit ones are loaded here: of blocks, [1, spans], of groups of each row,
    [ROWS, spans], or of rows, [ROWS].
    Prefetching those of blocks took registers that cost one concurrent program: a step of Llama-3.1-8B took an H200 9 %
    longer than with row scales.
    """
    if KIND == 0:
        return scales
    elif GROUP == 0:
        row = first + tl.arange(0, ROWS)
        return tl.load(scale_ptr + row, mask=row < end, other=0.0)
    elif HEIGHT == 1:
        span = step * (BLOCK_K // 4) + tl.arange(0, BLOCK_K // 4 // SPAN) * SPAN
        row = tl.minimum(first + tl.arange(0, ROWS), end - 1)
        offs = row[:, None] * (K // GROUP) + (span * 4 // GROUP)[None, :]
        return tl.load(scale_ptr + offs, mask=(span < K // 4)[None, :], other=0.0)
    else:
        span = step * (BLOCK_K // 4) + tl.arange(0, BLOCK_K // 4 // SPAN) * SPAN
        offs = tl.minimum(first, end - 1) // HEIGHT * ((K + GROUP - 1) // GROUP) + span * 4 // GROUP
        return tl.load(scale_ptr + offs, mask=span < K // 4, other=0.0)[None, :]


@triton.jit
def tile_sums(
    words,
    scales,
    zeros,
    x,
    back,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Return the sums of a tile's spans, [ROWS, spans].

    They are scaled, except by row scales.
    """
    sums = packed_dot(words, x, zeros, KIND, SPAN, COUNT)
    if SPAN > COUNT:
        sums = tl.sum(tl.reshape(sums, [sums.shape[0], sums.shape[1] * COUNT // SPAN, SPAN // COUNT]), 2)
    sums *= back[None, :]
    return sums * scales if GROUP > 0 else sums


@triton.jit
def load_column_order(order_ptr, columns, K: tl.constexpr, ORDERED: tl.constexpr):
    """Return the input indices of the weight's columns.

    Columns past the end get index 0 and have no weight.
    """
    return tl.load(order_ptr + columns, mask=columns < K, other=0) if ORDERED else columns


@triton.jit
def finish_tile(parts, scales, bias_ptr, rows, N, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, dtype: tl.constexpr):
    """Reduce a tile's partial sums and return its outputs, [ROWS].

    rows: of the weight, or of the half that the bias starts with.
    """
    sums = tl.sum(parts, 1)
    if GROUP == 0:
        sums *= scales
    return add_bias(sums, bias_ptr, rows, rows < N, HAS_BIAS, dtype)


@triton.jit
def quantized_gemv_kernel(
    x_ptr,
    word_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    x_weight_ptr,
    norm_weight_ptr,
    residual_ptr,
    order_ptr,
    y_ptr,
    total_ptr,
    eps,
    N,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    HEIGHT: tl.constexpr,
    RUN: tl.constexpr,
    SPAN: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ORDERED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply one row by a transposed weight, with optional fused steps.

    x: [K]; word: int32, [N, K / 8] int4 or [N, K / 4] 8-bit ([2 N, ..] with an ACTIVATION, gate first); KIND, RUN,
    SPAN, COUNT: as in `packed_dot.prepare_inputs`; GROUP: inputs that share a scale, 0 for row scales; scale, zero: of
    int4 [K / GROUP, N], float32 and uint8; scale of 8-bit weights: [N], or of each block of HEIGHT x GROUP, [rows /
    HEIGHT, K / GROUP], where HEIGHT is 1 or a multiple of ROWS; order, if ORDERED: input index of each column of the
    weight, [K] int32; y: [N]; other arguments as in `gemv.gemv_kernel`.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    GATED: tl.constexpr = ACTIVATION > 0
    height = N * 2 if GATED else N
    first = tl.program_id(0) * (ROWS * TILES)
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    words, scales, zeros = load_tile(
        word_ptr, scale_ptr, zero_ptr, first, 0, N, height, True, K, ROWS, BLOCK_K, KIND, GROUP, RUN, SPAN
    )
    if GATED:
        up_words, up_scales, up_zeros = load_tile(
            word_ptr, scale_ptr, zero_ptr, N + first, 0, height, height, True, K, ROWS, BLOCK_K, KIND, GROUP, RUN, SPAN
        )
    if MODE > 0:
        norm_weight = tl.load(norm_weight_ptr + offs_k, mask=mask_k, other=0.0)
        x_weight = norm_weight
    if MODE == 3:
        x_weight = tl.load(x_weight_ptr + offs_k, mask=mask_k, other=0.0)
    indices = load_column_order(order_ptr, offs_k, K, ORDERED)
    wait_for_previous(PDL)
    if MODE > 0:
        vector = normed_input(x_ptr, x_weight, norm_weight, residual_ptr, total_ptr, eps, offs_k, mask_k, K, MODE)
    elif STEPS == 1:
        vector = tl.load(x_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    else:
        vector = tl.load(x_ptr + indices, mask=mask_k, other=0.0).to(tl.float32)
    if STEPS == 1:
        if ORDERED:
            # Permute through shared memory, once: the row itself is loaded and stored 16 bytes per thread.
            vector = tl.gather(vector, indices, 0)
        x, back = prepare_inputs(vector, KIND, RUN, SPAN, COUNT)
        for tile in tl.range(0, TILES, num_stages=1):
            rows = first + tile * ROWS + tl.arange(0, ROWS)
            following, within = first + (tile + 1) * ROWS, tile + 1 < TILES
            now, now_zeros = words, zeros
            now_scales = current_scales(
                scales, scale_ptr, first + tile * ROWS, 0, N, K, ROWS, BLOCK_K, KIND, GROUP, HEIGHT, SPAN
            )
            words, scales, zeros = load_tile(
                word_ptr,
                scale_ptr,
                zero_ptr,
                following,
                0,
                N,
                height,
                within,
                K,
                ROWS,
                BLOCK_K,
                KIND,
                GROUP,
                RUN,
                SPAN,
            )
            if GATED:
                up_now, up_now_zeros = up_words, up_zeros
                up_now_scales = current_scales(
                    up_scales,
                    scale_ptr,
                    N + first + tile * ROWS,
                    0,
                    height,
                    K,
                    ROWS,
                    BLOCK_K,
                    KIND,
                    GROUP,
                    HEIGHT,
                    SPAN,
                )
                up_words, up_scales, up_zeros = load_tile(
                    word_ptr,
                    scale_ptr,
                    zero_ptr,
                    N + following,
                    0,
                    height,
                    height,
                    within,
                    K,
                    ROWS,
                    BLOCK_K,
                    KIND,
                    GROUP,
                    RUN,
                    SPAN,
                )
            parts = tile_sums(now, now_scales, now_zeros, x, back, KIND, GROUP, SPAN, COUNT)
            result = finish_tile(parts, now_scales, bias_ptr, rows, N, GROUP, HAS_BIAS, dtype)
            if GATED:
                parts = tile_sums(up_now, up_now_scales, up_now_zeros, x, back, KIND, GROUP, SPAN, COUNT)
                up = finish_tile(parts, up_now_scales, bias_ptr + N, rows, N, GROUP, HAS_BIAS, dtype)
                result = apply_gate(result, up, ACTIVATION)
            tl.store(y_ptr + rows, result, mask=rows < N)
    else:
        row_scales = scales
        if GROUP == 0:
            row_scales = current_scales(scales, scale_ptr, first, 0, N, K, ROWS, BLOCK_K, KIND, GROUP, HEIGHT, SPAN)
        parts = tl.zeros([ROWS, BLOCK_K // (8 if KIND == 0 else 4) // SPAN], tl.float32)
        for step in tl.range(0, STEPS, num_stages=1):
            now, now_zeros, inputs = words, zeros, vector
            now_scales = row_scales
            if GROUP > 0:
                now_scales = current_scales(
                    scales, scale_ptr, first, step, N, K, ROWS, BLOCK_K, KIND, GROUP, HEIGHT, SPAN
                )
            words, scales, zeros = load_tile(
                word_ptr,
                scale_ptr,
                zero_ptr,
                first,
                step + 1,
                N,
                height,
                step + 1 < STEPS,
                K,
                ROWS,
                BLOCK_K,
                KIND,
                GROUP,
                RUN,
                SPAN,
            )
            ahead = offs_k + (step + 1) * BLOCK_K
            indices = load_column_order(order_ptr, ahead, K, ORDERED)
            vector = tl.load(x_ptr + indices, mask=ahead < K, other=0.0).to(tl.float32)
            x, back = prepare_inputs(inputs, KIND, RUN, SPAN, COUNT)
            parts += tile_sums(now, now_scales, now_zeros, x, back, KIND, GROUP, SPAN, COUNT)
        rows = first + tl.arange(0, ROWS)
        result = finish_tile(parts, row_scales, bias_ptr, rows, N, GROUP, HAS_BIAS, dtype)
        tl.store(y_ptr + rows, result, mask=rows < N)


def quantized_gemv(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    plan: GemvPlan,
    activation: Activation | None = None,
    pdl: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    x_weight: Tensor | None = None,
    order: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the GEMV of one row and a quantized weight, and the residual stream.

    x: [1, K]; weight: 8-bit, [N, K] int8, float8_e4m3fn or its bits as uint8, K a multiple of 16; or int4, [N, K / 8]
    int32, in the layout of `kernels.linear.int4_layout`, with K and the group size multiples of 32. scales: float32; of
    8-bit weights [N], per row, [N / 16, K / 128], per block, rounded up, or [N, groups], in groups of a multiple of 16;
    of int4 [N, groups], like zeros, uint8, both column-major. bias: [N]. activation: the weight holds the gate's rows
    before the up projection's, and activation(gate) * up is returned, [1, N / 2]. norm_weight: [K]; x is added to the
    residual stream, [1, K] (None: x starts it), and normalized; requires plan.block_k >= K. Without a norm the stream
    is x. x_weight: as in `gemv.normed_gemv`. order, of int4: input index of each column of the weight, [K] int32; the
    stream keeps the order of x. With `pdl` the preceding kernel may write everything but the weights and the order.
    """
    words, kind, group, run = _layout(weight, scales, zeros)
    height = scale_height(weight, scales)
    span = _SPAN if kind != INT4 or group % (INT4_STRIDE * run) == 0 else 1
    outputs = weight.shape[0] // (1 if activation is None else 2)
    inputs = words.shape[1] * (PER_WORD if kind == INT4 else _BYTES_A_WORD)
    assert x.shape == (1, inputs) and x.is_contiguous() and words.is_contiguous()
    plain = activation is None and norm_weight is None and plan.tiles == 1
    assert plain or plan.block_k >= inputs, f"block_k {plan.block_k} must hold whole rows of {inputs} if fused or tiled"
    _check_blocks(plan, outputs, kind, group, height, run, gated=activation is not None)
    assert order is None or (order.dtype, order.shape, order.is_contiguous()) == (torch.int32, (inputs,), True)
    y, total = x.new_empty(1, outputs), x if residual is None else torch.empty_like(x)
    quantized_gemv_kernel[(triton.cdiv(outputs, plan.rows * plan.tiles),)](
        *(x, words, scales, scales if zeros is None else zeros),
        *(x if given is None else given for given in (bias, x_weight, norm_weight, residual, order)),
        *(y, total, eps, outputs),
        K=inputs,
        KIND=kind,
        GROUP=group,
        HEIGHT=height,
        RUN=run,
        SPAN=span,
        COUNT=words_per_sum(kind, span),
        ROWS=plan.rows,
        BLOCK_K=plan.block_k,
        TILES=plan.tiles,
        HAS_BIAS=bias is not None,
        MODE=input_mode(norm_weight, residual, x_weight),
        ACTIVATION=0 if activation is None else activation.value,
        ORDERED=order is not None,
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return y, total


def _check_blocks(plan: GemvPlan, outputs: int, kind: int, group: int, height: int, run: int, *, gated: bool) -> None:
    """Check that the plan's steps and tiles end at block boundaries of the weight."""
    if kind == INT4:
        assert plan.block_k % (INT4_STRIDE * run) == 0, f"steps of {plan.block_k} end within a block of the order"
    elif group and height > 1:
        assert SCALE_ROWS % plan.rows == 0, "the rows of a tile are in one block"
        assert outputs % SCALE_ROWS == 0 or not gated, "the gate ends with a block"


def _layout(weight: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, int, int, int]:
    """Return a weight's words, their kind, the group size and the run length."""
    if zeros is not None:
        group, run = group_and_run(weight, scales, zeros)
        assert run, f"inputs in groups of {group} are in no order that kernels read"
        return weight, INT4, group, run
    assert weight.shape[1] % (_BYTES_A_WORD * _SPAN) == 0 and weight.is_contiguous()
    return weight.view(torch.int32), _KINDS[weight.dtype], scale_group(weight, scales), 1
