"""Bias, penalties, suppression and masks of logits, in two Triton kernels.

They keep no state between steps.

`mark` records the adjustments of each token in one int32: it writes only where one applies, by atomic integer
operations, which are order-independent. `adjust` reads logits, and the marks of rows with adjustments; it writes these
rows' adjusted logits, zeroes the marks for the next step, and computes each tile's inputs for the later kernels.
Oracles: `add_bias`, `penalize`, `suppress` and `apply_bitmask` of `kernels.reference.sampling`, in this order.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.fast_math import fast_div
from tandem.engine_core.kernels.sampling.columns import NUM_FLOATS, NUM_INTS, TEMPERATURE, TOP_K
from tandem.engine_core.kernels.sampling.inputs import FLOAT_COLUMNS, INT_COLUMNS, SamplingBatch, SamplingTables
from tandem.engine_core.kernels.sampling.scratch import SamplingScratch, num_warps_for
from tandem.engine_core.kernels.sampling.sort_key import best_of_tile, load_logits
from tandem.engine_core.kernels.sampling.weights import store_tile

PROMPT_LEN = tl.constexpr(INT_COLUMNS.index("prompt_len"))
MIN_TOKENS = tl.constexpr(INT_COLUMNS.index("min_tokens"))
REPETITION = tl.constexpr(FLOAT_COLUMNS.index("repetition_penalty"))
PRESENCE = tl.constexpr(FLOAT_COLUMNS.index("presence_penalty"))
FREQUENCY = tl.constexpr(FLOAT_COLUMNS.index("frequency_penalty"))

IN_PROMPT = tl.constexpr(1 << 30)
"""Mark bit: the token is in the prompt."""
SUPPRESSED = tl.constexpr(1 << 29)
"""Mark bit: the token is currently suppressed."""
BIASED = tl.constexpr(1 << 28)
"""Mark bit: the token has a bias."""
COUNT = tl.constexpr((1 << 28) - 1)
"""Mark bits: number of occurrences of the token in the output."""
PARTS = tl.constexpr(4)
"""Parts of a tile, adjusted sequentially."""
MARK_BLOCK = 1024
"""Tokens of the history per program and iteration."""
MIN_PARTS, MARK_PROGRAMS = 8, 2048
"""Minimum number of programs per row, and number of programs over all rows beyond that, about the concurrency of a
large GPU."""


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "masked_ptr"])
def _mark_kernel(
    rows_ptr,
    positions_ptr,
    tokens_ptr,
    ints_ptr,
    floats_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    suppressed_ptr,
    masked_ptr,
    marks_ptr,
    adjusted_ptr,
    touched_ptr,
    token_stride,
    mark_stride,
    vocab,
    NUM_BIASES: tl.constexpr,
    NUM_ENDS: tl.constexpr,
    ENDS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0)
    index = tl.program_id(1)
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + index).to(tl.int64)
    if row == 0:
        return
    start = index.to(tl.int64) * mark_stride
    float_ptrs = floats_ptr + row * NUM_FLOATS
    penalizes = tl.load(float_ptrs + REPETITION) != 1.0
    penalizes |= (tl.load(float_ptrs + PRESENCE) != 0.0) | (tl.load(float_ptrs + FREQUENCY) != 0.0)
    total = tl.load(positions_ptr + index) + 1
    prompt = tl.load(ints_ptr + row * NUM_INTS + PROMPT_LEN)
    if penalizes:
        for first in range(part * BLOCK, total, tl.num_programs(0) * BLOCK):
            positions = first + tl.arange(0, BLOCK)
            ids = tl.load(tokens_ptr + row * token_stride + positions, mask=positions < total, other=-1)
            valid = (ids >= 0) & (ids < vocab)
            in_prompt = positions < prompt
            tl.atomic_or(marks_ptr + start + ids, IN_PROMPT, mask=valid & in_prompt, sem="relaxed")
            tl.atomic_add(marks_ptr + start + ids, 1, mask=valid & ~in_prompt, sem="relaxed")
    if part == 0:
        offsets = tl.arange(0, NUM_BIASES)
        ids = tl.load(bias_ids_ptr + row * NUM_BIASES + offsets)
        valid = (ids >= 0) & (ids < vocab)
        biased = tl.max(valid.to(tl.int32), axis=0) > 0
        if biased:
            # The value is stored where the adjusted logit will be written. An id that is listed twice gets the sum of
            # its values, written twice.
            values = tl.load(bias_values_ptr + row * NUM_BIASES + offsets)
            for entry in range(NUM_BIASES):
                token = tl.load(bias_ids_ptr + row * NUM_BIASES + entry)
                if (token >= 0) & (token < vocab):
                    same = tl.sum(tl.where(ids == token, values, 0.0), axis=0)
                    tl.store(adjusted_ptr + start + token, same)
            tl.atomic_or(marks_ptr + start + ids, BIASED, mask=valid, sem="relaxed")
        ending = total - prompt < tl.load(ints_ptr + row * NUM_INTS + MIN_TOKENS)
        if ending:
            end_offsets = tl.arange(0, ENDS_PAD)
            end_mask = end_offsets < NUM_ENDS
            ends = tl.load(suppressed_ptr + row * NUM_ENDS + end_offsets, mask=end_mask, other=-1)
            tl.atomic_or(marks_ptr + start + ends, SUPPRESSED, mask=(ends >= 0) & (ends < vocab), sem="relaxed")
        touched = penalizes | biased | ending
        if HAS_MASK:
            touched |= tl.load(masked_ptr + index) != 0
        tl.store(touched_ptr + index, touched.to(tl.int32))


@triton.jit
def _apply_marks(x, bias, mark_bits, repetition, presence, frequency):
    """Return the logits of a tile after bias, penalties and suppression.

    Each step is rounded as in the oracle.
    """
    x = tl.where((mark_bits & BIASED) != 0, x + bias, x)
    count = (mark_bits & COUNT).to(tl.float32)
    held = (mark_bits & (COUNT | IN_PROMPT)) != 0
    x = tl.where(held, tl.where(x > 0, fast_div(x, repetition), x * repetition), x)
    x = x - count * frequency - tl.where(count > 0, presence, 0.0)
    return tl.where((mark_bits & SUPPRESSED) != 0, float("-inf"), x)


@triton.jit
def _adjust_tile(
    logits_ptr,
    marks_ptr,
    adjusted_ptr,
    allowed_ptr,
    float_ptrs,
    start,
    vocab,
    BLOCK: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Store a tile's adjusted logits, and zero its marks.

    The tile is processed in parts, because a thread's share of a whole tile would take too many registers from rows
    without adjustments. logits_ptr, marks_ptr, adjusted_ptr, allowed_ptr: of the row; float_ptrs: its parameters;
    start: first id of the tile.
    """
    repetition = tl.load(float_ptrs + REPETITION)
    presence = tl.load(float_ptrs + PRESENCE)
    frequency = tl.load(float_ptrs + FREQUENCY)
    part: tl.constexpr = BLOCK // PARTS
    for first in range(start, start + BLOCK, part):
        ids = first + tl.arange(0, part)
        mask = ids < vocab
        x = load_logits(logits_ptr, ids, mask)
        mark_bits = tl.load(marks_ptr + ids, mask=mask, other=0)
        bias = tl.load(adjusted_ptr + ids, mask=mask & ((mark_bits & BIASED) != 0), other=0.0)
        x = _apply_marks(x, bias, mark_bits, repetition, presence, frequency)
        if HAS_MASK:
            word = tl.load(allowed_ptr + ids // 32, mask=mask, other=0)
            x = tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))
        tl.store(adjusted_ptr + ids, x, mask=mask)
        tl.store(marks_ptr + ids, 0, mask=mask & (mark_bits != 0))
    # Make the stores of all threads visible to all threads.
    tl.debug_barrier()


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _adjust_kernel(
    logits_ptr,
    rows_ptr,
    ints_ptr,
    floats_ptr,
    allowed_ptr,
    marks_ptr,
    adjusted_ptr,
    touched_ptr,
    tile_best_ptr,
    masses_ptr,
    peaks_ptr,
    logit_stride,
    mark_stride,
    allowed_stride,
    vocab,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    index = tl.program_id(1)
    tiles = tl.num_programs(0)
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + index).to(tl.int64)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    raw = logits_ptr + index.to(tl.int64) * logit_stride
    # Issue these loads before anything waits for the row.
    x = load_logits(raw, ids, ids < vocab)
    if row == 0:
        return
    # Issue all loads that depend only on the row together.
    float_ptrs = floats_ptr + row * NUM_FLOATS
    temperature = tl.load(float_ptrs + TEMPERATURE)
    top_k = tl.load(ints_ptr + row * NUM_INTS + TOP_K)
    touched = tl.load(touched_ptr + index) != 0
    # Use the maximum before the adjustments, because a mask may hide a NaN.
    best, largest = best_of_tile(x, raw, tile * BLOCK, vocab)
    if touched:
        offset = index.to(tl.int64) * mark_stride
        _adjust_tile(
            raw,
            marks_ptr + offset,
            adjusted_ptr + offset,
            allowed_ptr + index.to(tl.int64) * allowed_stride,
            float_ptrs,
            tile * BLOCK,
            vocab,
            BLOCK,
            HAS_MASK,
        )
        x = load_logits(adjusted_ptr + offset, ids, ids < vocab)
        best, _ = best_of_tile(x, adjusted_ptr + offset, tile * BLOCK, vocab)
    store_tile(tile_best_ptr, masses_ptr, index, tile, tiles, x, best, largest, temperature, SEGMENT)
    if (temperature != 0.0) & (top_k > 0) & (top_k < vocab):
        groups: tl.constexpr = BLOCK // GROUP
        tops = tl.max(tl.reshape(x, [groups, GROUP]), axis=1)
        tl.store(peaks_ptr + (index * tiles + tile) * groups + tl.arange(0, groups), tops)


def history_parts(rows: int, max_len: int) -> int:
    """Return the number of programs that share the history of a row, a power of two.

    A program marks its blocks sequentially, so few rows with long histories get more programs; those of a short history
    only read its length. rows: to sample; max_len: longest history.
    """
    most = min(max_len // MARK_BLOCK, MARK_PROGRAMS // rows)
    return MIN_PARTS if most <= MIN_PARTS else 1 << (most.bit_length() - 1)


def mark(batch: SamplingBatch, tables: SamplingTables, scratch: SamplingScratch) -> None:
    """Mark each row's tokens with the adjustments that apply to them.

    Writes `marks`, the biases into `adjusted`, and `touched`.
    """
    ends, parts = tables.suppressed.shape[1], history_parts(len(batch.rows), tables.tokens.shape[1])
    _mark_kernel[(parts, len(batch.rows))](
        batch.rows,
        batch.positions,
        tables.tokens,
        tables.ints,
        tables.floats,
        tables.bias[0],
        tables.bias[1].view(tables.floats.dtype),
        tables.suppressed,
        batch.rows if batch.masked is None else batch.masked,
        scratch.marks,
        scratch.adjusted,
        scratch.touched,
        tables.tokens.stride(0),
        scratch.marks.stride(0),
        scratch.vocab_size,
        NUM_BIASES=tables.bias.shape[2],
        NUM_ENDS=ends,
        ENDS_PAD=triton.next_power_of_2(ends),
        BLOCK=MARK_BLOCK,
        HAS_MASK=batch.allowed is not None,
        **scratch.launch_options(4),
    )


def adjust(batch: SamplingBatch, tables: SamplingTables, scratch: SamplingScratch) -> None:
    """Adjust the logits of touched rows into `adjusted` and zero their marks.

    Writes `tile_best` for every row but the padding, `masses` for rows that draw, and `peaks` for rows with top-k.
    """
    logits, allowed = batch.logits, batch.allowed
    _adjust_kernel[scratch.grid(len(logits))](
        logits,
        batch.rows,
        tables.ints,
        tables.floats,
        scratch.touched if allowed is None else allowed,
        scratch.marks,
        scratch.adjusted,
        scratch.touched,
        scratch.tile_best,
        scratch.masses,
        scratch.peaks,
        logits.stride(0),
        scratch.marks.stride(0),
        0 if allowed is None else allowed.stride(0),
        scratch.vocab_size,
        BLOCK=scratch.tile,
        SEGMENT=scratch.segment,
        GROUP=scratch.group,
        HAS_MASK=allowed is not None,
        # Disable fused multiply-add, as in torch, so that adjusted logits equal the oracle's.
        enable_fp_fusion=False,
        # Rows without penalties should not lose occupancy to the registers of those that have some.
        maxnreg=80,
        **scratch.launch_options(num_warps_for(scratch.tile)),
    )
