"""Split-K GEMM y = x W^T for up to 64 rows of x and an int4 weight W.

Like `kernels.linear.splitk_gemm`, with weights that are unpacked in registers right before the tensor cores: a step of
the loop covers columns of one group, whose scale is applied to the step's sums.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.linear.int4_layout import PER_WORD, group_and_run
from tandem.engine_core.kernels.linear.int4_unpack import unpack_int4
from tandem.engine_core.kernels.linear.plans import block_rows, workspace_size
from tandem.engine_core.kernels.linear.splitk_gemm import finish_tile
from tandem.engine_core.kernels.tiles.plan_types import SplitKPlan


@triton.jit
def unpacked(words, zeros, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, dtype: tl.constexpr):
    """Return int4 values minus zero points, [BLOCK_N, BLOCK_K].

    words: [BLOCK_N, BLOCK_K / 8] int32, in the layout of `int4_layout`; zeros: [BLOCK_N] int32. The eight values of a
    word stay in its thread, which passes them to the tensor cores.
    """
    levels = unpack_int4(words, tl.broadcast_to(zeros[:, None], words.shape), dtype)
    # From the words' order to that of the inputs: bit fields t, j, e, c, d of an input index.
    levels = tl.reshape(levels, [BLOCK_N, 4, BLOCK_K // 32, 2, 2, 2])
    return tl.reshape(tl.permute(levels, (0, 2, 5, 4, 1, 3)), [BLOCK_N, BLOCK_K])


@triton.jit
def load_zeros(zero_ptr, offs):
    """Load zero points, four per offset.

    Asynchronous copies need at least four bytes. zero_ptr: int32; offs: of each first byte. Returns [4 * offsets]
    int32.
    """
    four = tl.load(zero_ptr + offs // 4)
    even = tl.join(four & 255, (four >> 16) & 255)
    odd = tl.join((four >> 8) & 255, (four >> 24) & 255)
    return tl.reshape(tl.join(even, odd), [4 * offs.shape[0]])


@triton.jit(do_not_specialize=["M"])
def int4_splitk_kernel(
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
    RUN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply rows by a transposed weight, with K split among programs.

    x: [M, K]; word: [N, K / 8] int32 ([2 N, K / 8] with an ACTIVATION, gate first); scale: [K / GROUP, N] float32;
    zero: likewise uint8, four in an int32; RUN: `run_length` of K and GROUP; BLOCK_K divides GROUP and is a multiple of
    32 * RUN; other arguments as in `splitk_gemm_kernel`. With an ACTIVATION a tile has BLOCK_N rows each of gate and
    up.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    precision: tl.constexpr = "ieee" if dtype.primitive_bitwidth == 32 else "tf32"
    BLOCKS: tl.constexpr = K // BLOCK_K
    PER: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    GATED: tl.constexpr = ACTIVATION > 0
    HEIGHT: tl.constexpr = BLOCK_N * 2 if GATED else BLOCK_N
    TURNS: tl.constexpr = BLOCK_K // 32
    PARTS: tl.constexpr = RUN // TURNS
    tile = tl.program_id(0)
    part = tl.program_id(1)
    begin = part * BLOCKS // SPLIT
    count = (part + 1) * BLOCKS // SPLIT - begin
    tokens = tl.arange(0, BLOCK_M)
    # Weight rows past the end repeat the last ones and are not stored.
    local = tl.arange(0, HEIGHT)
    fourth = tl.arange(0, HEIGHT // 4) * 4
    rows = tl.minimum(tile * BLOCK_N + local % BLOCK_N, N - 1)
    fourths = tl.minimum(tile * BLOCK_N + fourth % BLOCK_N, N - 4)
    stride = N
    if GATED:
        rows += local // BLOCK_N * N
        fourths += fourth // BLOCK_N * N
        stride = N * 2
    column = tl.arange(0, BLOCK_K // 8)
    if PARTS > 1:
        column = column // TURNS * RUN + column % TURNS
    left_ptr = word_ptr + rows.to(tl.int64)[:, None] * (K // 8) + column[None, :]
    right_ptr = x_ptr + tokens[None, :] * K + tl.arange(0, BLOCK_K)[:, None]
    mask_m = (tokens < M)[None, :]
    sums = tl.zeros([HEIGHT, BLOCK_M], tl.float32)
    wait_for_previous(PDL)
    for step in tl.range(0, PER, num_stages=STAGES):
        # Equal parts need no mask: the compiler removes a constant one.
        within = True if BLOCKS % SPLIT == 0 else step < count
        block = begin + step if BLOCKS % SPLIT == 0 else tl.minimum(begin + step, BLOCKS - 1)
        first = block // PARTS * (4 * RUN) + block % PARTS * TURNS
        group = block * BLOCK_K // GROUP * stride
        vectors = tl.load(right_ptr + block * BLOCK_K, mask=mask_m & within, other=0.0)
        words = tl.load(left_ptr + first)
        scales = tl.load(scale_ptr + group + rows)
        zeros = load_zeros(zero_ptr, group + fourths)
        weights = unpacked(words, zeros, HEIGHT, BLOCK_K, dtype)
        sums += tl.dot(weights, vectors, input_precision=precision) * scales[:, None]
    gate, ups = sums, sums
    if GATED:
        gate, ups = tl.split(tl.permute(tl.reshape(sums, [2, BLOCK_N, BLOCK_M]), (1, 2, 0)))
    finish_tile(
        gate,
        ups,
        bias_ptr,
        bias_ptr,
        y_ptr,
        partials_ptr,
        counters_ptr,
        M,
        N,
        BLOCK_M,
        BLOCK_N,
        SPLIT,
        HAS_BIAS,
        ACTIVATION,
        0,
    )


def int4_splitk(
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

    x: [M, K]; words, scales, zeros: int4, as in `quantized_gemv`; plan.block_k divides the group size, and is a
    multiple of 32; other arguments as in `splitk_gemm`.
    """
    outputs = words.shape[0] if activation is None else words.shape[0] // 2
    rows, inputs = x.shape
    group, run = group_and_run(words, scales, zeros)
    assert x.is_contiguous() and words.shape[1] * PER_WORD == inputs
    assert words.shape[0] % PER_WORD == 0 and run and (32 * run) % plan.block_k == plan.block_k % 32 == 0
    assert group % plan.block_k == 0 and plan.split * plan.block_k <= inputs, (
        f"groups of {group} inputs are not divisible into blocks of {plan.block_k}, or too few for {plan.split} parts"
    )
    floats, tiles = workspace_size(rows, outputs, plan, activation is not None)
    assert partials.numel() >= floats and counters.numel() >= tiles, "workspace too small"
    y = torch.empty(rows, outputs, device=x.device, dtype=x.dtype)
    int4_splitk_kernel[(triton.cdiv(outputs, plan.block_n), plan.split)](
        x,
        words,
        scales,
        zeros.t().view(torch.int32),
        x if bias is None else bias,
        y,
        partials,
        counters,
        rows,
        outputs,
        K=inputs,
        GROUP=group,
        RUN=run,
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
