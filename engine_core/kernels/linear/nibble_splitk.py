"""Product y = x W^T for up to 64 rows of x, with W in four bits an element.

It is `kernels.linear.splitk_gemm` with weights that are unpacked in registers: a step of the loop covers columns of one
group, whose scale multiplies the step's sums.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.fast_math import INTERPRETED
from tandem.engine_core.kernels.linear.nibble_gemv import PER_WORD
from tandem.engine_core.kernels.linear.plans import block_rows, workspace_size
from tandem.engine_core.kernels.linear.splitk_gemm import finish_tile
from tandem.engine_core.kernels.tiles.plan_types import SplitKPlan

UNPACK = """{{
    .reg .b32 a, b, c, d, s, one;
    mov.b32 one, {one};
    lop3.b32 a, $8, 0x000F000F, {base}, 0xEA;
    shr.u32 s, $8, 4;
    lop3.b32 b, s, 0x000F000F, {base}, 0xEA;
    shr.u32 s, $8, 8;
    lop3.b32 c, s, 0x000F000F, {base}, 0xEA;
    shr.u32 s, $8, 12;
    lop3.b32 d, s, 0x000F000F, {base}, 0xEA;
    fma.rn.{dtype} a, a, one, $9;
    fma.rn.{dtype} b, b, one, $9;
    fma.rn.{dtype} c, c, one, $9;
    fma.rn.{dtype} d, d, one, $9;
    mov.b32 {{$0, $4}}, a;
    mov.b32 {{$1, $5}}, b;
    mov.b32 {{$2, $6}}, c;
    mov.b32 {{$3, $7}}, d;
}}"""
UNPACK_BFLOAT16 = tl.constexpr(UNPACK.format(base="0x43004300", one="0x3F803F80", dtype="bf16x2"))
UNPACK_FLOAT16 = tl.constexpr(UNPACK.format(base="0x64006400", one="0x3C003C00", dtype="f16x2"))


@triton.jit
def level(words, zeros, PLACE: tl.constexpr, dtype: tl.constexpr):
    """Return the levels in one place of words, less zero points."""
    return (((words >> (4 * PLACE)) & 15) - zeros).to(dtype)


@triton.jit
def levels(words, zeros, dtype: tl.constexpr):
    """Return the eight levels of words, less zero points.

    words, zeros: int32 of one shape, zero points at most 63. Whole numbers of so few bits are exact in every dtype. On
    a GPU two levels at a time become the lowest bits of a float from 128 on (in float16, 1024), where these count whole
    numbers, and that number and the zero point are subtracted: conversions take far longer than all of this.
    """
    if INTERPRETED or dtype == tl.float32:
        l0, l1, l2, l3 = (
            level(words, zeros, 0, dtype), level(words, zeros, 1, dtype), level(words, zeros, 2, dtype),
            level(words, zeros, 3, dtype),
        )  # fmt: skip
        l4, l5, l6, l7 = (
            level(words, zeros, 4, dtype), level(words, zeros, 5, dtype), level(words, zeros, 6, dtype),
            level(words, zeros, 7, dtype),
        )  # fmt: skip
        return l0, l1, l2, l3, l4, l5, l6, l7
    BFLOAT: tl.constexpr = dtype == tl.bfloat16
    # Minus 128 (1024) and the zero point, twice.
    less = zeros + (0xC300 if BFLOAT else 0xE400)
    less = less | (less << 16)
    l0, l1, l2, l3, l4, l5, l6, l7 = tl.inline_asm_elementwise(
        UNPACK_BFLOAT16 if BFLOAT else UNPACK_FLOAT16,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, less],
        (tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
        True,
        1,
    )
    return (
        l0.to(dtype, bitcast=True), l1.to(dtype, bitcast=True), l2.to(dtype, bitcast=True),
        l3.to(dtype, bitcast=True), l4.to(dtype, bitcast=True), l5.to(dtype, bitcast=True),
        l6.to(dtype, bitcast=True), l7.to(dtype, bitcast=True),
    )  # fmt: skip


@triton.jit
def unpacked(words, zeros, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, dtype: tl.constexpr):
    """Return levels less zero points, [BLOCK_N, BLOCK_K].

    words: [BLOCK_N, BLOCK_K / 8] int32; zeros: [BLOCK_N] int32. The eight levels of a word stay in its thread, which
    stores them together where the product reads them.
    """
    l0, l1, l2, l3, l4, l5, l6, l7 = levels(words, tl.broadcast_to(zeros[:, None], words.shape), dtype)
    even = tl.join(tl.join(l0, l4), tl.join(l2, l6))
    odd = tl.join(tl.join(l1, l5), tl.join(l3, l7))
    return tl.reshape(tl.join(even, odd), [BLOCK_N, BLOCK_K])


@triton.jit(do_not_specialize=["M"])
def nibble_splitk_kernel(
    x_ptr,
    word_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    y_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply rows by a transposed weight, with K divided among programs.

    x: [M, K]; word: [N, K / 8] int32 ([2 N, K / 8] with an ACTIVATION, gate first); scale, zero: [N, K / GROUP],
    float32 and uint8; BLOCK_K divides GROUP; the rest as in `splitk_gemm_kernel`.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    precision: tl.constexpr = "ieee" if dtype.primitive_bitwidth == 32 else "tf32"
    BLOCKS: tl.constexpr = K // BLOCK_K
    PER: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    WORDS: tl.constexpr = K // 8
    GROUPS: tl.constexpr = K // GROUP
    GATED: tl.constexpr = ACTIVATION > 0
    tile = tl.program_id(0)
    part = tl.program_id(1)
    begin = part * BLOCKS // SPLIT
    count = (part + 1) * BLOCKS // SPLIT - begin
    tokens = tl.arange(0, BLOCK_M)
    # Weight rows past the end repeat the last one and are not stored.
    rows = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
    offs = rows.to(tl.int64)[:, None] * WORDS + tl.arange(0, BLOCK_K // 8)[None, :]
    right_ptr = x_ptr + tokens[None, :] * K + tl.arange(0, BLOCK_K)[:, None]
    mask_m = (tokens < M)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Bytes are not copied asynchronously: zero points are loaded a step ahead.
    group = begin * BLOCK_K // GROUP
    zeros = tl.load(zero_ptr + rows * GROUPS + group)
    upper_zeros = zeros
    if GATED:
        upper_zeros = tl.load(zero_ptr + (rows + N) * GROUPS + group)
    wait_for_previous(PDL)
    for step in tl.range(0, PER, num_stages=STAGES):
        within = True if BLOCKS % SPLIT == 0 else step < count
        block = tl.minimum(begin + step, BLOCKS - 1)
        group = block * BLOCK_K // GROUP
        later = tl.minimum(block + 1, BLOCKS - 1) * BLOCK_K // GROUP
        zeros_now, upper_now = zeros.to(tl.int32), upper_zeros.to(tl.int32)
        zeros = tl.load(zero_ptr + rows * GROUPS + later)
        if GATED:
            upper_zeros = tl.load(zero_ptr + (rows + N) * GROUPS + later)
        vectors = tl.load(right_ptr + block * BLOCK_K, mask=mask_m & within, other=0.0)
        words = tl.load(word_ptr + offs + block * (BLOCK_K // 8))
        scales = tl.load(scale_ptr + rows * GROUPS + group)
        weights = unpacked(words, zeros_now, BLOCK_N, BLOCK_K, dtype)
        sums += tl.dot(weights, vectors, input_precision=precision) * scales[:, None]
        if GATED:
            words = tl.load(word_ptr + N.to(tl.int64) * WORDS + offs + block * (BLOCK_K // 8))
            scales = tl.load(scale_ptr + (rows + N) * GROUPS + group)
            weights = unpacked(words, upper_now, BLOCK_N, BLOCK_K, dtype)
            ups += tl.dot(weights, vectors, input_precision=precision) * scales[:, None]
    finish_tile(
        sums, ups, bias_ptr, bias_ptr, y_ptr, partials_ptr, counters_ptr, M, N, BLOCK_M, BLOCK_N, SPLIT, HAS_BIAS,
        ACTIVATION, 0,
    )  # fmt: skip


def nibble_splitk(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    plan: SplitKPlan,
    partials: Tensor,
    counters: Tensor,
    activation: Activation | None = None,
    pdl: bool = False,
) -> Tensor:
    """Return x W^T + b, [M, N], or its gated activation.

    x: [M, K]; words, scales, zeros: those of `nibble_gemv`; plan.block_k divides the size of a group; the rest as in
    `splitk_gemm`.
    """
    outputs = words.shape[0] if activation is None else words.shape[0] // 2
    rows, inputs = x.shape
    group = inputs // scales.shape[1]
    assert x.is_contiguous() and words.is_contiguous() and words.shape[1] * PER_WORD == inputs
    assert group % plan.block_k == 0 and plan.split * plan.block_k <= inputs, (
        f"groups of {group} inputs are not divisible into blocks of {plan.block_k}, or too few for {plan.split} parts"
    )
    floats, tiles = workspace_size(rows, outputs, plan, activation is not None)
    assert partials.numel() >= floats and counters.numel() >= tiles, "workspace too small"
    y = torch.empty(rows, outputs, device=x.device, dtype=x.dtype)
    nibble_splitk_kernel[(triton.cdiv(outputs, plan.block_n), plan.split)](
        x,
        words,
        scales,
        zeros,
        x if bias is None else bias,
        y,
        partials,
        counters,
        rows,
        outputs,
        K=inputs,
        GROUP=group,
        BLOCK_M=block_rows(rows),
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        SPLIT=plan.split,
        STAGES=plan.stages,
        HAS_BIAS=bias is not None,
        ACTIVATION=0 if activation is None else activation.value,
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return y
