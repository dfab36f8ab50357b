"""Token ranks as int64 sort keys, and other helpers of all sampling kernels.

A row is cut into tiles, one per program, and its best rank is their maximum: an integer maximum, independent of the
order of the programs. The greedy kernel computes it by an atomic operation, and its last program writes the token; the
others store it per tile, and the next kernel computes the maximum.

Row 0 is padding: its sampled token is 0, and only table entries that no sequence reads are written for it.

A row whose model logits contain NaN or +inf, or -inf only, has no distribution: its sampled token is -1.
"""
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.fast_math import INTERPRETED, nan_max, to_float32
from tandem.engine_core.kernels.sampling.scratch import NOTHING

ID_BITS = tl.constexpr(20)
"""Bits of a token id within a rank."""
ID_MASK = tl.constexpr((1 << 20) - 1)
MAX_VOCAB = (1 << 20) - 1
INVALID = tl.constexpr(0x7F800001 << 20)
"""Rank of a tile with a NaN or +inf logit; it is above that of every token, and its value is NaN."""
EMPTY = tl.constexpr(-0x7F800001 << 20)
"""Rank of a tile whose logits are all -inf: that value with an unused id."""
ALL_MASKED = tl.constexpr((-0x7F800001 << 20) | ((1 << 20) - 1))
"""Rank of a tile with only -inf left after bias, penalties, suppression and mask: that value with id 0."""

ADJACENT = tl.constexpr(8)
"""Adjacent tokens of a thread; only their maximum is compared with others."""


@triton.jit
def sortable_bits(x):
    """Return an int32 with the sort order of the float32 x.

    Both zeros map to 0. x must not be NaN.
    """
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def value_of_bits(bits):
    """Return the float32 of sortable bits."""
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def to_rank(x, ids):
    """Return the rank of a token.

    It is an int64 that sorts by value x; ties by lower id first.
    """
    return (sortable_bits(x).to(tl.int64) << ID_BITS) | (ids ^ ID_MASK).to(tl.int64)


@triton.jit
def rank_id(rank):
    """Return the token id of a rank."""
    return (rank & ID_MASK).to(tl.int32) ^ ID_MASK


@triton.jit
def rank_value(rank):
    """Return the float32 value of a rank."""
    return value_of_bits((rank >> ID_BITS).to(tl.int32))


@triton.jit
def load_logits(logits_ptr, offsets, mask):
    """Load logits as float32; masked-out elements become -inf."""
    return to_float32(tl.load(logits_ptr + offsets, mask=mask, other=float("-inf")))


@triton.jit
def _max_or_nan(x, axis: tl.constexpr):
    """Return the maximum along an axis, and NaN or +inf where an element is NaN."""
    return tl.max(tl.where(x == x, x, float("inf")), axis=axis) if INTERPRETED else tl.reduce(x, axis, nan_max)


@triton.jit
def best_of(x, ids):
    """Return the best rank of some values: the largest one at the lowest id."""
    top = tl.max(x, axis=0)
    return to_rank(top, tl.min(tl.where(x == top, ids, ID_MASK), axis=0))


@triton.jit
def best_of_tile(x, logits_ptr, start, vocab):
    """Return the best rank of a tile, and its largest logit.

    If a logit is NaN, the latter is +inf, and the rank is meaningless. The lowest id of the maximum is found by the
    maxima of adjacent tokens; only the first group with the maximum is read again. x: the tile's logits, from
    `load_logits`; logits_ptr: of the row; start: first id of the tile.
    """
    groups: tl.constexpr = x.shape[0] // ADJACENT
    peaks = _max_or_nan(tl.reshape(x, [groups, ADJACENT]), 1)
    top = _max_or_nan(peaks, 0)
    top = tl.where(top == top, top, float("inf"))
    group = tl.min(tl.where(peaks == top, tl.arange(0, groups), groups - 1), axis=0)
    ids = start + group * ADJACENT + tl.arange(0, ADJACENT)
    again = load_logits(logits_ptr, ids, ids < vocab)
    return to_rank(top, tl.min(tl.where(again == top, ids, ID_MASK), axis=0)), top


@triton.jit
def classify_tile(best, largest):
    """Return the best rank of a tile, or the one that marks it as unusable.

    best: the rank after adjustments; largest: the tile's largest logit before them, from `best_of_tile`.
    """
    starved = rank_value(best) == float("-inf")
    best = tl.where(largest == float("-inf"), EMPTY, tl.where(starved, ALL_MASKED, best))
    return tl.where(largest == float("inf"), INVALID, best)


@triton.jit
def token_of(rank):
    """Return the token to sample for the best rank of a row.

    It is the rank's id, or -1 if the row has no distribution.
    """
    return tl.where((rank == INVALID) | (rank == EMPTY), -1, rank_id(rank))


@triton.jit
def write_token(
    sampled_ptr,
    tokens_ptr,
    lengths_ptr,
    token_stride,
    max_len,
    index,
    row,
    position,
    token,
):
    """Write a sampled token to the result and to the token table, and the row's length.

    In the table it takes the position after `position`. A position from `max_len` on is dropped, and the padding row
    only ever writes position 1 and keeps its length. -1 becomes id 0 in the table, because the next step, which may be
    launched already, reads an embedding there.
    """
    tl.store(sampled_ptr + index, token)
    offset = position.to(tl.int64) + 1
    mask = (offset < max_len) & ((row > 0) | (offset == 1))
    tl.store(tokens_ptr + row * token_stride + offset, tl.maximum(token, 0), mask=mask)
    tl.store(lengths_ptr + row, (offset + 1).to(tl.int32), mask=mask & (row > 0))


@triton.jit
def combine_tiles(winner_ptr, arrivals_ptr, index, offer, tiles):
    """Reduce a tile's best rank into its row's, and return the row's when complete.

    The last tile to arrive gets the row's best, the others get NOTHING.

    winner: [B] int64, all NOTHING; arrivals: [B] int32 zeros. Both are reset.
    """
    tl.atomic_max(winner_ptr + index, offer, sem="relaxed")
    result = tl.full([], NOTHING, tl.int64)
    if tl.atomic_add(arrivals_ptr + index, 1, sem="acq_rel") == tiles - 1:
        tl.atomic_xchg(arrivals_ptr + index, 0, sem="relaxed")
        result = tl.atomic_xchg(winner_ptr + index, result, sem="relaxed")
    return result


def check_logits(logits: Tensor) -> None:
    """Raise ValueError for logits with an unsupported shape, layout, dtype or vocabulary size."""
    if logits.dim() != 2 or logits.stride(1) != 1 or logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"logits must be [B, V] with contiguous rows, in float32, bfloat16 or float16, not {tuple(logits.shape)} "
            f"of strides {logits.stride()} in {logits.dtype}"
        )
    if not 0 < logits.shape[1] <= MAX_VOCAB:
        raise ValueError(f"the vocabulary must have 1 to {MAX_VOCAB} tokens, not {logits.shape[1]}")
