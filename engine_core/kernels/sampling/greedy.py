"""The largest logit of every row, in one Triton kernel; and what all sampling kernels share.

A row is cut into tiles, one a program. Each program offers its best token to the row by an atomic maximum over a packed
integer, and the last one to arrive writes the token. So the result does not depend on the order of the programs.
Oracle: `sampling.sampler.sample`.

Row 0 is padding: its sampled token is 0, and no kernel here writes anything else for it.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.fast_math import INTERPRETED

ID_BITS = tl.constexpr(20)
"""Bits of a token id within a packed integer."""
ID_MASK = tl.constexpr((1 << 20) - 1)
NOTHING = tl.constexpr(-(1 << 62))
"""Less than every packed integer."""
MAX_VOCAB = (1 << 20) - 1


@triton.jit
def ordered(x):
    """An int32 that compares as x does, for float32 other than NaN; both zeros give 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def pack(x, ids):
    """An int64 that compares by value x, equal ones by lower id."""
    return (ordered(x).to(tl.int64) << ID_BITS) | (ids ^ ID_MASK).to(tl.int64)


@triton.jit
def packed_id(packed):
    return (packed & ID_MASK).to(tl.int32) ^ ID_MASK


@triton.jit
def packed_value(packed):
    key = (packed >> ID_BITS).to(tl.int32)
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(logits, offsets, inside):
    """Float32 values; NaN and what is outside become -inf."""
    x = tl.load(logits + offsets, mask=inside, other=float("-inf")).to(tl.float32)
    # On the GPU a maximum drops NaN, in one instruction; the interpreter's keeps it.
    return tl.where(x == x, x, float("-inf")) if INTERPRETED else tl.maximum(x, float("-inf"))


@triton.jit
def best_of(x, ids):
    """The packed largest value of a tile and its lowest id."""
    top = tl.max(x, axis=0)
    return pack(top, tl.min(tl.where(x == top, ids, ID_MASK), axis=0))


@triton.jit
def publish(sampled, tokens, token_stride, max_len, index, row, position, token):
    """Writes a sampled token to its row of the result and to its place in the token table."""
    tl.store(sampled + index, token)
    place = position.to(tl.int64) + 1
    tl.store(tokens + row * token_stride + place, token, mask=(place < max_len) & ((row > 0) | (place == 1)))


@triton.jit
def arrive(winner, arrivals, index, offer, tiles):
    """Offers a tile's best to the row. Returns the row's best to the last tile that arrives and NOTHING to the others.

    winner: [B] int64 of NOTHING; arrivals: [B] int32 zeros. Both are left so.
    """
    tl.atomic_max(winner + index, offer, sem="relaxed")
    result = tl.full([], NOTHING, tl.int64)
    if tl.atomic_add(arrivals + index, 1, sem="acq_rel") == tiles - 1:
        tl.atomic_xchg(arrivals + index, 0, sem="relaxed")
        result = tl.atomic_xchg(winner + index, result, sem="relaxed")
    return result


@triton.jit
def _greedy_kernel(
    logits,
    rows,
    positions,
    sampled,
    tokens,
    winner,
    arrivals,
    logit_stride,
    token_stride,
    max_len,
    vocab,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(1)
    tile = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(rows + index).to(tl.int64)
    position = tl.load(positions + index)
    if row == 0:
        if tile == 0:
            publish(sampled, tokens, token_stride, max_len, index, row, position, 0)
        return
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits + index.to(tl.int64) * logit_stride, ids, ids < vocab)
    best = arrive(winner, arrivals, index, best_of(x, ids), tl.num_programs(0))
    if best != NOTHING:
        publish(sampled, tokens, token_stride, max_len, index, row, position, packed_id(best))


def launch_options(pdl: bool, warps: int) -> dict[str, object]:
    """Keyword arguments common to the launches here; the interpreter knows no programmatic dependent launch."""
    options: dict[str, object] = {"PDL": pdl, "num_warps": warps}
    return options | {"launch_pdl": True} if pdl else options


def sample_greedy(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    tokens: Tensor,
    winner: Tensor,
    arrivals: Tensor,
    sampled: Tensor,
    block: int,
    pdl: bool,
) -> None:
    """The largest logit of each row, equal ones: the lowest id; NaN counts as -inf, and nothing but -inf yields 0.

    logits: [B, V] float32, bfloat16 or float16, rows contiguous; rows, positions: [B] int32; tokens: [R, max_len]
    int32; winner: [>= B] int64, all NOTHING, and arrivals: [>= B] int32, all 0, both left so; sampled: [B] int32.
    Writes sampled[b] and tokens[rows[b], positions[b] + 1].
    """
    batch, vocab = logits.shape
    _greedy_kernel[(triton.cdiv(vocab, block), batch)](
        logits,
        rows,
        positions,
        sampled,
        tokens,
        winner,
        arrivals,
        logits.stride(0),
        tokens.stride(0),
        tokens.shape[1],
        vocab,
        BLOCK=block,
        **launch_options(pdl, warps_for(block)),
    )


def warps_for(block: int, each: int = 32) -> int:
    """Warps of a program that holds a tile of so many tokens, `each` of them a thread."""
    return max(1, min(8, block // (32 * each)))


def check_logits(logits: Tensor) -> None:
    """ValueError for logits that the sampling kernels cannot take."""
    if logits.dim() != 2 or logits.stride(1) != 1 or logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError("logits must be [B, V] with contiguous rows, in float32, bfloat16 or float16")
    if not 0 < logits.shape[1] <= MAX_VOCAB:
        raise ValueError(f"the vocabulary must have 1 to {MAX_VOCAB} tokens")
