"""Product y = x W^T for one row x, with W in four bits an element.

As in `kernels.linear.gemv`, each program owns a run of W's rows, sums in float32, and may do the norm before the
product and the gated activation behind it. Tensor cores multiply, with x in eight equal columns: they idle otherwise,
and what a weight would cost in multiplying and adding is spared. A group of columns has a scale s and a zero point z,
and contributes s * (sum of q x - z * sum of x).

Columns sorted by group (act-order) come with their order, in which each program takes x. Nothing writes the order, so
it is loaded before the wait for the kernel that produces x.
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
from tandem.engine_core.kernels.linear.gemv import gated, input_mode, normed_input, with_bias
from tandem.engine_core.kernels.linear.nibble_order import PER_WORD, group_and_run
from tandem.engine_core.kernels.linear.nibble_pairs import RAISED, eight_levels
from tandem.engine_core.kernels.tiles.plan_types import NIBBLE_ROWS, NIBBLE_STRIDE, GemvPlan

_PIECES = (128, 64, 32)
"""Inputs of a group that are summed at once."""
_RAISED = tl.constexpr(RAISED)


@triton.jit
def rows_at(first, place, N, GATED: tl.constexpr):
    """Return the weight's rows of some places of a program's tile.

    Rows past the end repeat the last one and are not stored.
    """
    return tl.minimum(first + place % 8, N - 1) + place // 8 * N if GATED else tl.minimum(first + place, N - 1)


@triton.jit
def load_words(
    word_ptr, first, step, N, K: tl.constexpr, RUN: tl.constexpr, BLOCKS: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """Load the words of a step, [4, 8, BLOCKS, 2, RUN].

    The compiler spreads such a tensor over threads just as a tensor core's operand is: 4 x 8 threads have runs of RUN
    words of rows 0 to 7 and 8 to 15, and warps divide the blocks.
    """
    place = tl.arange(0, 8)[None, :, None, None, None] + tl.arange(0, 2)[None, None, None, :, None] * 8
    words = (step * BLOCKS + tl.arange(0, BLOCKS))[None, None, :, None, None] * (4 * RUN)
    words += tl.arange(0, 4)[:, None, None, None, None] * RUN + tl.arange(0, RUN)[None, None, None, None, :]
    row_ptr = word_ptr + rows_at(first, place, N, GATED).to(tl.int64) * (K // 8)
    return tl.load(row_ptr + words, mask=words < K // 8, other=0)


@triton.jit
def load_step(
    word_ptr, scale_ptr, zero_ptr, first, step, N, K: tl.constexpr, GROUP: tl.constexpr, PIECE: tl.constexpr,
    RUN: tl.constexpr, BLOCKS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Load the words, scales and zero points of a step.

    The words are those of `load_words`; each piece has a scale and a zero point, [PIECES, 16].
    """
    PIECES: tl.constexpr = BLOCKS * RUN * 32 // PIECE
    piece = tl.arange(0, PIECES)
    begin = (step * BLOCKS + piece % BLOCKS) * (32 * RUN) + piece // BLOCKS * PIECE
    offs = (begin // GROUP)[:, None] * (N * 2 if GATED else N) + rows_at(first, tl.arange(0, 16), N, GATED)[None, :]
    mask = (begin < K)[:, None]
    words = load_words(word_ptr, first, step, N, K, RUN, BLOCKS, GATED)
    return words, tl.load(scale_ptr + offs, mask=mask, other=0.0), tl.load(zero_ptr + offs, mask=mask, other=0)


@triton.jit
def weight_tile(words, dtype: tl.constexpr, PIECE: tl.constexpr, RAISED_LEVELS: tl.constexpr):
    """Return the levels of `load_words`, [PIECES, 16, PIECE]."""
    BLOCKS: tl.constexpr = words.shape[2]
    TURNS: tl.constexpr = PIECE // 32
    PARTS: tl.constexpr = words.shape[4] // TURNS
    levels = eight_levels(words, tl.zeros(words.shape, tl.int32), dtype, RAISED_LEVELS)
    # Parts of an input's number are t, (row, block, half,) j in parts and turns, e, c, d.
    levels = tl.reshape(levels, [4, 8, BLOCKS, 2, PARTS, TURNS, 2, 2, 2])
    return tl.reshape(tl.permute(levels, (4, 2, 3, 1, 5, 8, 0, 7, 6)), [PARTS * BLOCKS, 16, PIECE])


@triton.jit
def input_pieces(vector, PIECE: tl.constexpr, RUN: tl.constexpr, BLOCKS: tl.constexpr):
    """Return a step's inputs in the order of `weight_tile`, [PIECES, PIECE]."""
    TURNS: tl.constexpr = PIECE // 32
    vector = tl.reshape(vector, [BLOCKS, RUN // TURNS, TURNS, 2, 2, 4, 2])
    return tl.reshape(tl.permute(vector, (1, 0, 2, 3, 5, 4, 6)), [BLOCKS * RUN // TURNS, PIECE])


@triton.jit
def step_sums(loaded, vector, PIECE: tl.constexpr):
    """Return what a step adds to the product, and what zero points take from it.

    The first is in eight equal columns, [16, 8], the second [PIECES, 16]. loaded: `load_step`; vector: the step's
    inputs.
    """
    words, scales, zeros = loaded
    dtype: tl.constexpr = vector.dtype
    # float16 has no room for so much more than a level in the sums.
    RAISED_LEVELS: tl.constexpr = dtype == tl.bfloat16 and not INTERPRETED
    precision: tl.constexpr = "ieee" if dtype == tl.float32 else "tf32"
    x = input_pieces(vector, PIECE, words.shape[4], words.shape[2])
    total = tl.sum(x.to(tl.float32), 1)
    weights = weight_tile(words, dtype, PIECE, RAISED_LEVELS)
    products = tl.dot(
        weights, tl.broadcast_to(x[:, :, None], [x.shape[0], PIECE, 8]), input_precision=precision
    )  # fmt: skip
    less = zeros.to(tl.float32) + (_RAISED if RAISED_LEVELS else 0)
    return tl.sum(products * scales[:, :, None], 0), scales * less * total[:, None]


@triton.jit
def load_places(order_ptr, columns, K: tl.constexpr, BLOCK_K: tl.constexpr, ORDERED: tl.constexpr):
    """Return the inputs that columns of the weight are for.

    Columns past the end have the last place of a step: in one step that is past the end too, and holds 0.
    """
    return tl.load(order_ptr + columns, mask=columns < K, other=BLOCK_K - 1) if ORDERED else columns


@triton.jit
def store_tile(sums, less, bias_ptr, y_ptr, first, N, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    """Finish and store the outputs of a program.

    sums, less: those of `step_sums`.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    result = tl.sum(sums, 1) * 0.125 - tl.sum(less, 0)
    GATED: tl.constexpr = ACTIVATION > 0
    offs_n = first + tl.arange(0, 8 if GATED else 16)
    mask_n = offs_n < N
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(result, [2, 8])))
        gate = with_bias(gate, bias_ptr, offs_n, mask_n, HAS_BIAS, dtype)
        up = with_bias(up, bias_ptr + N, offs_n, mask_n, HAS_BIAS, dtype)
        tl.store(y_ptr + offs_n, gated(gate, up, ACTIVATION), mask=mask_n)
    else:
        tl.store(y_ptr + offs_n, with_bias(result, bias_ptr, offs_n, mask_n, HAS_BIAS, dtype), mask=mask_n)


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
    order_ptr,
    y_ptr,
    total_ptr,
    eps,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    PIECE: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ORDERED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply one row by a transposed weight, with optional fused steps.

    x: [K]; word: [N, K / 8] int32 ([2 N, K / 8] with an ACTIVATION, gate first); scale, zero: [K / GROUP, N], float32
    and uint8; order, if ORDERED: input of each column of the weight, [K] int32; RUN: `run_of` K and GROUP; PIECE
    divides GROUP and 32 * RUN; y: [N]; the rest as in `gemv_kernel`. A program has 16 rows of the weight, which a
    tensor core takes at once, half of them the gate's if there is one.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    BLOCKS: tl.constexpr = BLOCK_K // (32 * RUN)
    GATED: tl.constexpr = ACTIVATION > 0
    first = tl.program_id(0) * (8 if GATED else 16)
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    loaded = load_step(word_ptr, scale_ptr, zero_ptr, first, 0, N, K, GROUP, PIECE, RUN, BLOCKS, GATED)
    if MODE > 0:
        norm_weight = tl.load(norm_weight_ptr + offs_k, mask=mask_k, other=0.0)
        x_weight = norm_weight
    if MODE == 3:
        x_weight = tl.load(x_weight_ptr + offs_k, mask=mask_k, other=0.0)
    places = load_places(order_ptr, offs_k, K, BLOCK_K, ORDERED)
    wait_for_previous(PDL)
    if MODE > 0:
        vector = normed_input(x_ptr, x_weight, norm_weight, residual_ptr, total_ptr, eps, offs_k, mask_k, K, MODE)
        vector = vector.to(dtype)
    elif STEPS == 1:
        vector = tl.load(x_ptr + offs_k, mask=mask_k, other=0.0)
    else:
        vector = tl.load(x_ptr + places, mask=mask_k, other=0.0)
        places = load_places(order_ptr, offs_k + BLOCK_K, K, BLOCK_K, ORDERED)
    if STEPS == 1:
        if ORDERED:
            # Through shared memory, once: the row itself is loaded and stored in runs of 16 bytes a thread.
            vector = tl.gather(vector, places, 0)
        sums, less = step_sums(loaded, vector, PIECE)
    else:
        sums = tl.zeros([16, 8], tl.float32)
        less = tl.zeros([BLOCK_K // PIECE, 16], tl.float32)
        for step in tl.range(0, STEPS, num_stages=1):
            now, vector_now = loaded, vector
            ahead = offs_k + (step + 1) * BLOCK_K
            loaded = load_step(word_ptr, scale_ptr, zero_ptr, first, step + 1, N, K, GROUP, PIECE, RUN, BLOCKS, GATED)
            vector = tl.load(x_ptr + places, mask=ahead < K, other=0.0)
            places = load_places(order_ptr, ahead + BLOCK_K, K, BLOCK_K, ORDERED)
            more, away = step_sums(now, vector_now, PIECE)
            sums += more
            less += away
    store_tile(sums, less, bias_ptr, y_ptr, first, N, HAS_BIAS, ACTIVATION)


def _piece_of(plan: GemvPlan, group: int, run: int, *, gated: bool) -> int:
    """Return how many inputs of a group a plan's programs sum at once.

    The plan must fit the weight, which has runs of words.
    """
    assert run, f"inputs in groups of {group} do not divide into {NIBBLE_STRIDE}"
    assert plan.rows * (2 if gated else 1) * plan.tiles == NIBBLE_ROWS, "a program has one tile of rows"
    assert plan.block_k % (NIBBLE_STRIDE * run) == 0, f"steps of {plan.block_k} for blocks of {NIBBLE_STRIDE * run}"
    return next(size for size in _PIECES if group % size == NIBBLE_STRIDE * run % size == 0)


def _checked_inputs(x: Tensor, words: Tensor, order: Tensor | None) -> int:
    """Return the number of inputs of a row, which fits the weight and the order."""
    rows, inputs = x.shape
    assert rows == 1 and x.is_contiguous() and words.shape[1] * PER_WORD == inputs
    if order is not None:
        assert order.dtype == torch.int32 and order.shape == (inputs,) and order.is_contiguous()
    return inputs


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
    order: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the product of one row and a weight of four bits.

    The residual stream follows it. x: [1, K]; words: [N, K / 8] int32, in the order of `kernels.linear.nibble_order`;
    scales: [N, groups] float32; zeros: [N, groups] uint8, both with the numbers of a group side by side; bias: [N]. K
    and the inputs of a group are multiples of 32. activation: the weight holds the gate's rows before the up
    projection's, and activation(gate) * up is returned, [1, N / 2]. norm_weight: [K]; x is added to the residual
    stream, [1, K] (None: it starts it), and normalised, where plan.block_k is at least K. Without a norm the stream is
    x. x_weight: as in `add_norm_gemv`. order: the input of each column of the weight, [K] int32; the stream keeps the
    order of x. With `pdl` the kernel right before may write all but the weights and the order.
    """
    outputs = words.shape[0] if activation is None else words.shape[0] // 2
    inputs = _checked_inputs(x, words, order)
    group, run = group_and_run(words, scales, zeros)
    assert norm_weight is None or plan.block_k >= inputs, "only whole rows are normalised"
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
        x if order is None else order,
        y,
        total,
        eps,
        outputs,
        K=inputs,
        GROUP=group,
        PIECE=_piece_of(plan, group, run, gated=activation is not None),
        RUN=run,
        BLOCK_K=plan.block_k,
        HAS_BIAS=bias is not None,
        MODE=input_mode(norm_weight, residual, x_weight),
        ACTIVATION=0 if activation is None else activation.value,
        ORDERED=order is not None,
        PDL=pdl,
        num_warps=plan.warps,
        maxnreg=plan.registers,
        **({"launch_pdl": True} if pdl else {}),
    )
    return y, total
