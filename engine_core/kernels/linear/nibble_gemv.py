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
def eighths(vector, WORDS: tl.constexpr):
    """Return the elements that each place of a word multiplies.

    That is elements 0, 8, 16, ..., then 1, 9, 17, ... and so on to 7, 15, 23, ... of a vector, each [WORDS].
    """
    even, odd = tl.split(tl.reshape(vector, [WORDS, 2, 2, 2]))
    of_0_4, of_2_6 = tl.split(even)
    of_1_5, of_3_7 = tl.split(odd)
    x0, x4 = tl.split(of_0_4)
    x1, x5 = tl.split(of_1_5)
    x2, x6 = tl.split(of_2_6)
    x3, x7 = tl.split(of_3_7)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def level_at(words, AT: tl.constexpr):
    """Return the level from bit AT on, times 2^(AT - 149).

    It is in float32, and AT at most 20. Such small floats count in units of 2^-149, so the bits are the number and no
    conversion is needed.
    """
    return (words & (15 << AT)).to(tl.float32, bitcast=True)


@triton.jit
def group_values(ptr, rows, step, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_W: tl.constexpr):
    """Load the scale or zero point of each word of a step.

    rows: [ROWS]. Returns [ROWS, BLOCK_W]. The compiler gives a small load, of one number for each group, the layout of
    what it is for; a load of one for each word would keep its own, and the sums would pass through shared memory.
    """
    # The largest power of two that divides a group's words.
    SHARE: tl.constexpr = min((GROUP // 8) & -(GROUP // 8), BLOCK_W)
    COUNT: tl.constexpr = BLOCK_W // SHARE
    ROWS: tl.constexpr = rows.shape[0]
    first = (step * COUNT + tl.arange(0, COUNT)) * (SHARE * 8)
    values = tl.load(ptr + rows[:, None] * (K // GROUP) + (first // GROUP)[None, :], mask=(first < K)[None, :], other=0)
    return tl.reshape(tl.broadcast_to(values[:, :, None], [ROWS, COUNT, SHARE]), [ROWS, BLOCK_W])


@triton.jit
def load_step(
    word_ptr, scale_ptr, zero_ptr, rows, step, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_W: tl.constexpr
):  # fmt: skip
    """Load words, scales and zero points of a step.

    All are [ROWS, BLOCK_W].
    """
    offs_w = step * BLOCK_W + tl.arange(0, BLOCK_W)
    # The hint keeps the compiler from loading four words to a thread: with one, the eight elements of x that a thread
    # loads are those that its word multiplies. Else x would pass through shared memory.
    places = word_ptr + rows.to(tl.int64)[:, None] * (K // 8) + offs_w[None, :]
    words = tl.load(tl.multiple_of(places, [4, 4]), mask=(offs_w < K // 8)[None, :], other=0)
    scales = group_values(scale_ptr, rows, step, K, GROUP, BLOCK_W)
    return words, scales, group_values(zero_ptr, rows, step, K, GROUP, BLOCK_W)


@triton.jit
def group_sums(loaded, x8):
    """Return what each word adds to its row's product, times 2^-85.

    It is [ROWS, WORDS] in float32. loaded: `load_step`; x8: `eighths` of x in float32, each below 2^63. All elements of
    a word stay in its thread.
    """
    words, scales, zeros = loaded
    x0, x1, x2, x3, x4, x5, x6, x7 = x8
    high = words >> 8
    sums = level_at(words, 0) * (x0 * 2.0**64)[None, :]
    sums += level_at(words, 4) * (x1 * 2.0**60)[None, :]
    sums += level_at(words, 8) * (x2 * 2.0**56)[None, :]
    sums += level_at(words, 12) * (x3 * 2.0**52)[None, :]
    sums += level_at(words, 16) * (x4 * 2.0**48)[None, :]
    sums += level_at(words, 20) * (x5 * 2.0**44)[None, :]
    sums += level_at(high, 16) * (x6 * 2.0**48)[None, :]
    sums += level_at(high, 20) * (x7 * 2.0**44)[None, :]
    total = (((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7))) * 2.0**-85
    return scales * (sums - zeros.to(tl.float32) * total[None, :])


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
    BLOCK_W: tl.constexpr = BLOCK_K // 8
    GATED: tl.constexpr = ACTIVATION > 0
    offs_n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask_n = offs_n < N
    # Rows past the end repeat the last one and are not stored.
    rows = tl.minimum(offs_n, N - 1)
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    loaded = load_step(word_ptr, scale_ptr, zero_ptr, rows, 0, K, GROUP, BLOCK_W)
    if GATED:
        upper = load_step(word_ptr, scale_ptr, zero_ptr, rows + N, 0, K, GROUP, BLOCK_W)
    if MODE > 0:
        norm_weight = tl.load(norm_weight_ptr + offs_k, mask=mask_k, other=0.0)
        x_weight = norm_weight
    if MODE == 3:
        x_weight = tl.load(x_weight_ptr + offs_k, mask=mask_k, other=0.0)
    wait_for_previous(PDL)
    parts = tl.zeros([ROWS, BLOCK_W], tl.float32)
    ups = tl.zeros([ROWS, BLOCK_W], tl.float32)
    for step in tl.static_range(STEPS):
        if MODE > 0:
            vector = normed_input(x_ptr, x_weight, norm_weight, residual_ptr, total_ptr, eps, offs_k, mask_k, K, MODE)
        else:
            columns = offs_k + step * BLOCK_K
            vector = tl.load(x_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
        x8 = eighths(vector, BLOCK_W)
        parts += group_sums(loaded, x8)
        if GATED:
            ups += group_sums(upper, x8)
        if step + 1 < STEPS:
            loaded = load_step(word_ptr, scale_ptr, zero_ptr, rows, step + 1, K, GROUP, BLOCK_W)
            if GATED:
                upper = load_step(word_ptr, scale_ptr, zero_ptr, rows + N, step + 1, K, GROUP, BLOCK_W)
    result = with_bias(tl.sum(parts, 1) * 2.0**85, bias_ptr, offs_n, mask_n, HAS_BIAS, dtype)
    if GATED:
        up = with_bias(tl.sum(ups, 1) * 2.0**85, bias_ptr + N, offs_n, mask_n, HAS_BIAS, dtype)
        result = gated(result, up, ACTIVATION)
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
