"""What a row's parameters do to its logits before a token is drawn, in two Triton kernels without state between steps.

`mark` notes in one int32 a token what applies to it: it writes only where something does, by atomic integer operations,
whose order does not matter. `adjust` reads logits and marks once, writes the adjusted logits of rows that have any
marks, zeroes the marks for the next step, and gathers what the later kernels want to know of each tile.
Oracles: `reference_sampling.add_bias`, `penalize`, `suppress` and `apply_bitmask`, in this order.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.fast_math import quotient
from tandem.engine_core.kernels.sampling.greedy import best_of, launch_options, load_logits, warps_for

COLUMNS = tl.constexpr(6)
"""Columns of the tables of integers and floats. Integers: row, prompt_len, top_k, choice, seed, unused. Floats:
temperature, top_p, min_p, repetition, presence, frequency."""
IN_PROMPT = tl.constexpr(1 << 30)
SUPPRESSED = tl.constexpr(1 << 29)
BIASED = tl.constexpr(1 << 28)
COUNT = tl.constexpr((1 << 28) - 1)
"""Bits of a mark: how often the output holds the token."""
LOG2_E = tl.constexpr(1.4426950408889634)
HISTORY_PARTS = 8
MARK_BLOCK = 1024


@triton.jit
def log2_slope(temperature):
    """Factor from a logit to the binary logarithm of its weight, finite for every temperature."""
    return tl.minimum(tl.div_rn(LOG2_E, temperature), 1e38)


@triton.jit
def _mark_kernel(
    rows,
    positions,
    suppress,
    tokens,
    ints,
    floats,
    bias_ids,
    bias_values,
    suppressed,
    marks,
    adjusted,
    touched,
    token_stride,
    mark_stride,
    vocab,
    BIASES: tl.constexpr,
    ENDS: tl.constexpr,
    ENDS_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0)
    index = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(rows + index).to(tl.int64)
    if row == 0:
        return
    start = index.to(tl.int64) * mark_stride
    parameters = floats + row * COLUMNS
    penalizes = (tl.load(parameters + 3) != 1.0) | (tl.load(parameters + 4) != 0.0) | (tl.load(parameters + 5) != 0.0)
    if penalizes:
        total = tl.load(positions + index) + 1
        prompt = tl.load(ints + row * COLUMNS + 1)
        for first in range(part * BLOCK, total, PARTS * BLOCK):
            places = first + tl.arange(0, BLOCK)
            ids = tl.load(tokens + row * token_stride + places, mask=places < total, other=-1)
            valid = (ids >= 0) & (ids < vocab)
            in_prompt = places < prompt
            tl.atomic_or(marks + start + ids, IN_PROMPT, mask=valid & in_prompt, sem="relaxed")
            tl.atomic_add(marks + start + ids, 1, mask=valid & ~in_prompt, sem="relaxed")
    if part == 0:
        places = tl.arange(0, BIASES)
        ids = tl.load(bias_ids + row * BIASES + places)
        valid = (ids >= 0) & (ids < vocab)
        biased = tl.max(valid.to(tl.int32), axis=0) > 0
        if biased:
            # The value waits where the adjusted logit will be written. An id listed twice gets the sum, twice.
            values = tl.load(bias_values + row * BIASES + places)
            for entry in range(BIASES):
                token = tl.load(bias_ids + row * BIASES + entry)
                if (token >= 0) & (token < vocab):
                    same = tl.sum(tl.where(ids == token, values, 0.0), axis=0)
                    tl.store(adjusted + start + token, same)
            tl.atomic_or(marks + start + ids, BIASED, mask=valid, sem="relaxed")
        ending = tl.load(suppress + index) != 0
        if ending:
            slots = tl.arange(0, ENDS_PAD)
            ends = tl.load(suppressed + row * ENDS + slots, mask=slots < ENDS, other=-1)
            tl.atomic_or(marks + start + ends, SUPPRESSED, mask=(ends >= 0) & (ends < vocab), sem="relaxed")
        tl.store(touched + index, (penalizes | biased | ending | HAS_MASK).to(tl.int32))


@triton.jit
def _marked(x, bias, mark, repetition, presence, frequency):
    """The logits of a tile after bias, penalties and suppression, each rounded as the oracle rounds."""
    x = tl.where((mark & BIASED) != 0, x + bias, x)
    count = (mark & COUNT).to(tl.float32)
    held = (mark & (COUNT | IN_PROMPT)) != 0
    x = tl.where(held, tl.where(x > 0, quotient(x, repetition), x * repetition), x)
    x = x - count * frequency - tl.where(count > 0, presence, 0.0)
    return tl.where((mark & SUPPRESSED) != 0, float("-inf"), x)


@triton.jit
def _adjust_kernel(
    logits,
    rows,
    ints,
    floats,
    allowed,
    marks,
    adjusted,
    touched,
    best,
    peaks,
    logit_stride,
    mark_stride,
    allowed_stride,
    vocab,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    index = tl.program_id(1)
    tiles = tl.num_programs(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(rows + index).to(tl.int64)
    if row == 0:
        return
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    x = load_logits(logits + index.to(tl.int64) * logit_stride, ids, inside)
    # All loads that need nothing but the row go out together.
    parameters = floats + row * COLUMNS
    temperature = tl.load(parameters)
    top_k = tl.load(ints + row * COLUMNS + 2)
    if tl.load(touched + index) != 0:
        places = index.to(tl.int64) * mark_stride + ids
        mark = tl.load(marks + places, mask=inside, other=0)
        bias = tl.load(adjusted + places, mask=inside & ((mark & BIASED) != 0), other=0.0)
        x = _marked(x, bias, mark, tl.load(parameters + 3), tl.load(parameters + 4), tl.load(parameters + 5))
        if HAS_MASK:
            word = tl.load(allowed + index.to(tl.int64) * allowed_stride + ids // 32, mask=inside, other=0)
            x = tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))
        tl.store(adjusted + places, x, mask=inside)
        tl.store(marks + places, 0, mask=inside & (mark != 0))
    tl.store(best + index * tiles + tile, best_of(x, ids))
    if (temperature != 0.0) & (top_k > 0) & (top_k < vocab):
        groups: tl.constexpr = BLOCK // GROUP
        tops = tl.max(tl.reshape(x, [groups, GROUP]), axis=1)
        tl.store(peaks + (index * tiles + tile) * groups + tl.arange(0, groups), tops)


def mark(
    rows: Tensor,
    positions: Tensor,
    suppress: Tensor,
    tokens: Tensor,
    ints: Tensor,
    floats: Tensor,
    bias: Tensor,
    suppressed: Tensor,
    marks: Tensor,
    adjusted: Tensor,
    touched: Tensor,
    vocab: int,
    has_mask: bool,
    pdl: bool,
) -> None:
    """Notes what applies to which token of each row.

    rows, positions, suppress: [B] int32; tokens: [R, max_len] int32; ints: [R, 6] int64; floats: [R, 6] float32;
    bias: [2, R, K] int32, ids (-1: none) and the bits of float32 values, K a power of two; suppressed: [R, E] int32.
    Writes marks [>= B, >= V] int32 (zeros before), the biases into adjusted (float32, same strides) and touched [B].
    """
    biases, ends = bias.shape[2], suppressed.shape[1]
    _mark_kernel[(HISTORY_PARTS, len(rows))](
        rows,
        positions,
        suppress,
        tokens,
        ints,
        floats,
        bias[0],
        bias[1].view(floats.dtype),
        suppressed,
        marks,
        adjusted,
        touched,
        tokens.stride(0),
        marks.stride(0),
        vocab,
        BIASES=biases,
        ENDS=ends,
        ENDS_PAD=triton.next_power_of_2(ends),
        PARTS=HISTORY_PARTS,
        BLOCK=MARK_BLOCK,
        HAS_MASK=has_mask,
        **launch_options(pdl, 4),
    )


def adjust(
    logits: Tensor,
    rows: Tensor,
    ints: Tensor,
    floats: Tensor,
    allowed: Tensor | None,
    marks: Tensor,
    adjusted: Tensor,
    touched: Tensor,
    best: Tensor,
    peaks: Tensor,
    block: int,
    group: int,
    pdl: bool,
) -> None:
    """Adjusts the logits of touched rows into `adjusted` and zeroes their marks; logits itself stays as it is.

    For each of the T = ceil(V / block) tiles of a row it writes best [B, T] int64 (packed value and id) and, where the
    row truncates by rank, peaks [B, T, block / group] float32 (group maxima).
    """
    batch, vocab = logits.shape
    _adjust_kernel[(triton.cdiv(vocab, block), batch)](
        logits,
        rows,
        ints,
        floats,
        touched if allowed is None else allowed,
        marks,
        adjusted,
        touched,
        best,
        peaks,
        logits.stride(0),
        marks.stride(0),
        0 if allowed is None else allowed.stride(0),
        vocab,
        BLOCK=block,
        GROUP=group,
        HAS_MASK=allowed is not None,
        # Products and sums are rounded apart, as in torch, so that adjusted logits are equal to the oracle's.
        enable_fp_fusion=False,
        # Rows without penalties should not lose their parallelism to the registers of those that have some.
        maxnreg=80,
        **launch_options(pdl, warps_for(block, 16)),
    )
