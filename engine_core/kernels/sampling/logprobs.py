"""Log-probabilities of one token a row and of the row's most probable ones, in Triton: one pass over the logits.

Each tile gives its largest logit, the sum of exp(logit - largest) (Milakov and Gimelshein, 2018) and its best tokens;
one program a row adds the sums up in a fixed order and merges the tokens. So a row's result does not depend on the
batch. Oracle: `kernels.reference_logprobs`. NaN counts as -inf, as in sampling.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.sampling.greedy import (
    NOTHING,
    check_logits,
    load_logits,
    pack,
    packed_id,
    packed_value,
    warps_for,
)

TILE = 4096


@triton.jit(do_not_specialize=["wanted"])
def _tile_kernel(logits, tops, masses, best, logit_stride, vocab, wanted, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    index = tl.program_id(1)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    x = load_logits(logits + index.to(tl.int64) * logit_stride, ids, inside)
    top = tl.max(x, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    place = index * tl.num_programs(0) + tile
    tl.store(tops + place, top)
    tl.store(masses + place, tl.sum(tl.exp(x - shift), axis=0))
    packed = tl.where(inside, pack(x, ids), NOTHING)
    for rank in range(wanted):
        largest = tl.max(packed, axis=0)
        tl.store(best + place * wanted + rank, largest)
        packed = tl.where(packed == largest, NOTHING, packed)


@triton.jit(do_not_specialize=["chosen", "lines", "wanted"])
def _merge_kernel(
    logits,
    chosen,
    tops,
    masses,
    best,
    lines,
    logit_stride,
    tiles,
    wanted,
    TILES_PAD: tl.constexpr,
    BEST_PAD: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, TILES_PAD)
    inside = places < tiles
    top = tl.load(tops + index * tiles + places, mask=inside, other=float("-inf"))
    mass = tl.load(masses + index * tiles + places, mask=inside, other=0.0)
    largest = tl.max(top, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    normalizer = shift + tl.log(tl.sum(mass * tl.exp(top - shift), axis=0))
    line = lines + index * (1 + 2 * wanted)
    x = load_logits(logits + index * logit_stride, tl.load(chosen + index), True)
    own = tl.where(x == float("-inf"), x, x - normalizer)
    tl.store(line, own.to(tl.int32, bitcast=True))
    offsets = tl.arange(0, BEST_PAD)
    packed = tl.load(best + index * tiles * wanted + offsets, mask=offsets < tiles * wanted, other=NOTHING)
    for rank in range(wanted):
        winner = tl.max(packed, axis=0)
        value = packed_value(winner)
        value = tl.where(value == float("-inf"), value, value - normalizer)
        tl.store(line + 1 + rank, value.to(tl.int32, bitcast=True))
        tl.store(line + 1 + wanted + rank, packed_id(winner))
        packed = tl.where(packed == winner, NOTHING, packed)


class LogprobKernels:
    """Scratch for steps of up to `max_batch` rows, so that no call allocates, synchronises or reads the host.

    One instance serves all steps that are enqueued one after the other on one stream.
    """

    def __init__(self, vocab_size: int, max_batch: int, max_top: int, device: torch.device, tile: int = TILE) -> None:
        """max_top: most alternatives a call may want; tile: a power of two."""
        self.vocab_size = vocab_size
        self.max_batch = max_batch
        self.max_top = max_top
        self.tile = tile
        self._tiles = triton.cdiv(vocab_size, tile)
        shape = (max_batch, self._tiles)
        self._tops = torch.zeros(shape, dtype=torch.float32, device=device)
        self._masses = torch.zeros(shape, dtype=torch.float32, device=device)
        self._best = torch.zeros((*shape, max_top), dtype=torch.int64, device=device)

    def run(self, logits: Tensor, chosen: Tensor, top: int, lines: Tensor) -> None:
        """logits: [B, V] float32, bfloat16 or float16, rows contiguous, not modified; chosen: [B] int32, ids of the
        vocabulary; top: at most V and `max_top`; lines: [B, 1 + 2 * top] int32 contiguous, written as in
        `reference_logprobs.logprob_lines`. ValueError for other logits, a larger batch or more alternatives.
        """
        check_logits(logits)
        batch, vocab = logits.shape
        if vocab != self.vocab_size or batch > self.max_batch or not 0 <= top <= min(self.max_top, vocab):
            raise ValueError(
                f"{top} alternatives of logits of shape {tuple(logits.shape)} do not fit a vocabulary of "
                f"{self.vocab_size}, steps of up to {self.max_batch} rows and {self.max_top} alternatives"
            )
        if not batch:
            return
        tiles, stride = self._tiles, logits.stride(0)
        parts = (self._tops, self._masses, self._best)
        _tile_kernel[(tiles, batch)](
            logits, *parts, stride, vocab, top, BLOCK=self.tile, num_warps=warps_for(self.tile, each=16)
        )
        best_pad = triton.next_power_of_2(max(1, tiles * self.max_top))
        _merge_kernel[(batch,)](
            *(logits, chosen, *parts, lines, stride, tiles, top),
            TILES_PAD=triton.next_power_of_2(tiles),
            BEST_PAD=best_pad,
            num_warps=warps_for(best_pad),
        )
