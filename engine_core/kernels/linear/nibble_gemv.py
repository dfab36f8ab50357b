"""Product y = x W^T for one row x, with W in four bits an element.

As in `kernels.linear.gemv`, each program owns a run of W's rows, sums in float32, and may do the norm before the
product and the gated activation behind it. A group of columns has a scale s and a zero point z, and contributes
s * (sum of q x - z * sum of x), so weights are not made into numbers one by one.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.linear.gemv import gated, input_mode, normed_input, with_bias
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan

PER_WORD = 8


@triton.jit
def group_sums(words, x8, scale_ptr, zero_ptr, rows, offs_w, mask_w, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Return what each word adds to its row's product, [ROWS, WORDS] float32.

    words: [ROWS, WORDS] int32; x8: [WORDS, 8] float32; rows: [ROWS]; offs_w: [WORDS].
    """
    shifts = tl.arange(0, 8) * 4
    levels = (words[:, :, None] >> shifts[None, None, :]) & 15
    sums = tl.sum(levels.to(tl.float32) * x8[None, :, :], 2)
    offs = rows[:, None] * GROUPS + (offs_w * 8 // GROUP)[None, :]
    scales = tl.load(scale_ptr + offs, mask=mask_w[None, :], other=0.0)
    zeros = tl.load(zero_ptr + offs, mask=mask_w[None, :], other=0).to(tl.float32)
    return scales * (sums - zeros * tl.sum(x8, 1)[None, :])


@triton.jit
def nibble_gemv_kernel(
    x_ptr,
    word_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    x_weight_ptr,
    norm_weight_ptr,
    residual_ptr,
    y_ptr,
    total_ptr,
    eps,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply one row by a transposed weight, with optional fused steps.

    x: [K]; word: [N, K / 8] int32 ([2 N, K / 8] with an ACTIVATION, gate first); scale, zero: [N, K / GROUP], float32
    and uint8; y: [N]; the rest as in `gemv_kernel`. A program makes ROWS elements of y.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    WORDS: tl.constexpr = K // 8
    BLOCK_W: tl.constexpr = BLOCK_K // 8
    GROUPS: tl.constexpr = K // GROUP
    GATED: tl.constexpr = ACTIVATION > 0
    offs_n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask_n = offs_n < N
    # Rows past the end repeat the last one and are not stored.
    rows = tl.minimum(offs_n, N - 1)
    offs_w = tl.arange(0, BLOCK_W)
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    word_rows = word_ptr + rows.to(tl.int64)[:, None] * WORDS
    words = tl.load(word_rows + offs_w[None, :], mask=(offs_w < WORDS)[None, :], other=0)
    if MODE > 0:
        norm_weight = tl.load(norm_weight_ptr + offs_k, mask=mask_k, other=0.0)
        x_weight = norm_weight
    if MODE == 3:
        x_weight = tl.load(x_weight_ptr + offs_k, mask=mask_k, other=0.0)
    wait_for_previous(PDL)
    parts = tl.zeros([ROWS, BLOCK_W], tl.float32)
    ups = tl.zeros([ROWS, BLOCK_W], tl.float32)
    for step in tl.static_range(STEPS):
        now = offs_w + step * BLOCK_W
        within = now < WORDS
        if MODE > 0:
            vector = normed_input(x_ptr, x_weight, norm_weight, residual_ptr, total_ptr, eps, offs_k, mask_k, K, MODE)
        else:
            columns = offs_k + step * BLOCK_K
            vector = tl.load(x_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
        x8 = tl.reshape(vector, [BLOCK_W, 8])
        parts += group_sums(words, x8, scale_ptr, zero_ptr, rows, now, within, GROUPS, GROUP)
        if GATED:
            upper = tl.load(word_rows + N.to(tl.int64) * WORDS + now[None, :], mask=within[None, :], other=0)
            ups += group_sums(upper, x8, scale_ptr, zero_ptr, rows + N, now, within, GROUPS, GROUP)
        if step + 1 < STEPS:
            words = tl.load(word_rows + now[None, :] + BLOCK_W, mask=(now + BLOCK_W < WORDS)[None, :], other=0)
    result = with_bias(tl.sum(parts, 1), bias_ptr, offs_n, mask_n, HAS_BIAS, dtype)
    if GATED:
        result = gated(result, with_bias(tl.sum(ups, 1), bias_ptr + N, offs_n, mask_n, HAS_BIAS, dtype), ACTIVATION)
    tl.store(y_ptr + offs_n, result, mask=mask_n)


def nibble_gemv(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    plan: GemvPlan,
    activation: Activation | None = None,
    pdl: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    x_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the product of one row and a weight of four bits.

    The residual stream follows it. x: [1, K]; words: [N, K / 8] int32, element 8 i + j in bits 4 j of word i; scales:
    [N, groups] float32; zeros: [N, groups] uint8; bias: [N].

    activation: the weight holds the gate's rows before the up projection's, and activation(gate) * up is returned, [1,
    N / 2]. norm_weight: [K]; x is added to the residual stream, [1, K] (None: it starts it), and normalised, where
    plan.block_k is at least K. Without a norm the stream is x. x_weight: as in `add_norm_gemv`. With `pdl` the kernel
    right before may write all but the weights.
    """
    outputs = words.shape[0] if activation is None else words.shape[0] // 2
    rows, inputs = x.shape
    assert rows == 1 and x.is_contiguous() and words.is_contiguous() and words.shape[1] * PER_WORD == inputs
    assert plan.tiles == 1 and (norm_weight is None or plan.block_k >= inputs), "only whole rows are normalised"
    y = torch.empty(1, outputs, device=x.device, dtype=x.dtype)
    total = x if residual is None else torch.empty_like(x)
    nibble_gemv_kernel[(triton.cdiv(outputs, plan.rows),)](
        x,
        words,
        scales,
        zeros,
        x if bias is None else bias,
        x if x_weight is None else x_weight,
        x if norm_weight is None else norm_weight,
        x if residual is None else residual,
        y,
        total,
        eps,
        outputs,
        K=inputs,
        GROUP=inputs // scales.shape[1],
        ROWS=plan.rows,
        BLOCK_K=plan.block_k,
        HAS_BIAS=bias is not None,
        MODE=input_mode(norm_weight, residual, x_weight),
        ACTIVATION=0 if activation is None else activation.value,
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return y, total
