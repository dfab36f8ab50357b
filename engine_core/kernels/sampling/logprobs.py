"""Log-probabilities of one token per row and of the row's top tokens, in one pass over the logits.

Each tile computes its maximum logit, the sum of exp(logit - maximum) (Milakov and Gimelshein, 2018) and its top tokens;
one program per row combines the sums in a fixed order and merges the tokens. So a row's result does not depend on the
batch. Oracle: `kernels.reference.sampling.logprob_records`. NaN counts as -inf.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.fast_math import INTERPRETED
from tandem.engine_core.kernels.sampling.scratch import NOTHING, num_warps_for
from tandem.engine_core.kernels.sampling.sort_key import check_logits, rank_id, rank_value, to_rank

TILE = 4096
"""Tokens per program."""


@triton.jit
def _load_logits(logits_ptr, offsets, mask):
    """Load logits as float32; NaN and masked-out elements become -inf."""
    x = tl.load(logits_ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    # On the GPU a maximum drops NaN, in one instruction; the interpreter's propagates it.
    return tl.where(x == x, x, float("-inf")) if INTERPRETED else tl.maximum(x, float("-inf"))


@triton.jit(do_not_specialize=["index_ptr", "num_top"])
def _tile_kernel(
    logits_ptr,
    index_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    tile_best_ptr,
    logit_stride,
    vocab,
    num_top,
    BLOCK: tl.constexpr,
    INDEXED: tl.constexpr,
):
    tile = tl.program_id(0)
    index = tl.program_id(1)
    row = tl.load(index_ptr + index) if INDEXED else index
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocab
    x = _load_logits(logits_ptr + row.to(tl.int64) * logit_stride, ids, mask)
    top = tl.max(x, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    offset = index * tl.num_programs(0) + tile
    tl.store(tile_max_ptr + offset, top)
    tl.store(tile_sum_ptr + offset, tl.sum(tl.exp(x - shift), axis=0))
    ranks = tl.where(mask, to_rank(x, ids), NOTHING)
    for order in range(num_top):
        largest = tl.max(ranks, axis=0)
        tl.store(tile_best_ptr + offset * num_top + order, largest)
        ranks = tl.where(ranks == largest, NOTHING, ranks)


@triton.jit(do_not_specialize=["index_ptr", "chosen_ptr", "records_ptr", "num_top"])
def _merge_kernel(
    logits_ptr,
    index_ptr,
    chosen_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    tile_best_ptr,
    records_ptr,
    logit_stride,
    tiles,
    num_top,
    TILES_PAD: tl.constexpr,
    BEST_PAD: tl.constexpr,
    INDEXED: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(index_ptr + index).to(tl.int64) if INDEXED else index
    offsets = tl.arange(0, TILES_PAD)
    mask = offsets < tiles
    top = tl.load(tile_max_ptr + index * tiles + offsets, mask=mask, other=float("-inf"))
    mass = tl.load(tile_sum_ptr + index * tiles + offsets, mask=mask, other=0.0)
    largest = tl.max(top, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    normalizer = shift + tl.log(tl.sum(mass * tl.exp(top - shift), axis=0))
    record_ptr = records_ptr + row * (1 + 2 * num_top)
    chosen = tl.load(chosen_ptr + row)
    x = _load_logits(logits_ptr + row * logit_stride, chosen, chosen >= 0)
    own = tl.where(x == float("-inf"), x, x - normalizer)
    tl.store(record_ptr, own.to(tl.int32, bitcast=True))
    best_offsets = tl.arange(0, BEST_PAD)
    best_mask = best_offsets < tiles * num_top
    ranks = tl.load(tile_best_ptr + index * tiles * num_top + best_offsets, mask=best_mask, other=NOTHING)
    for order in range(num_top):
        winner = tl.max(ranks, axis=0)
        value = rank_value(winner)
        value = tl.where(value == float("-inf"), value, value - normalizer)
        tl.store(record_ptr + 1 + order, value.to(tl.int32, bitcast=True))
        tl.store(record_ptr + 1 + num_top + order, rank_id(winner))
        ranks = tl.where(ranks == winner, NOTHING, ranks)


class TritonScorer:
    """Implement `sampling.scorer.TokenScorer` in Triton.

    Its scratch serves steps of up to `max_batch` rows. No call allocates, synchronizes or reads the host. One instance
    serves all steps that are enqueued in sequence on one stream.
    """

    def __init__(self, vocab_size: int, max_batch: int, max_top: int, device: torch.device, tile: int = TILE) -> None:
        """Allocate the scratch.

        max_top: maximum number of alternatives per call; tile: tokens per program, a power of two.
        """
        self.vocab_size = vocab_size
        self.max_batch = max_batch
        self.max_top = max_top
        self.tile = tile
        self._tiles = triton.cdiv(vocab_size, tile)
        shape = (max_batch, self._tiles)
        self._tile_max = torch.zeros(shape, dtype=torch.float32, device=device)
        self._tile_sum = torch.zeros(shape, dtype=torch.float32, device=device)
        self._tile_best = torch.zeros((*shape, max_top), dtype=torch.int64, device=device)

    def run(self, logits: Tensor, chosen: Tensor, top: int, records: Tensor, index: Tensor | None = None) -> None:
        """Write one record per row, as in `logprob_records`.

        records: [B, 1 + 2 * top] int32, contiguous, written.

        logits: [B, V] float32, bfloat16 or float16, rows contiguous, not modified; chosen: [B] int32, ids of the
        vocabulary, or -1 for none; top: at most V and `max_top`; index: [K] int32, rows whose records are written, None
        for all. Raises ValueError for unsupported logits, a larger batch or more alternatives.
        """
        check_logits(logits)
        vocab, batch = logits.shape[1], len(logits if index is None else index)
        if vocab != self.vocab_size or batch > self.max_batch or not 0 <= top <= min(self.max_top, vocab):
            raise ValueError(
                f"{top} alternatives of logits of shape {tuple(logits.shape)} do not fit a vocabulary of "
                f"{self.vocab_size}, steps of up to {self.max_batch} rows and {self.max_top} alternatives"
            )
        if not batch:
            return
        tiles, stride = self._tiles, logits.stride(0)
        scratch = (self._tile_max, self._tile_sum, self._tile_best)
        rows, indexed = chosen if index is None else index, index is not None
        _tile_kernel[(tiles, batch)](
            *(logits, rows, *scratch, stride, vocab, top),
            BLOCK=self.tile,
            INDEXED=indexed,
            num_warps=num_warps_for(self.tile, per_thread=16),
        )
        best_pad = triton.next_power_of_2(max(1, tiles * self.max_top))
        _merge_kernel[(batch,)](
            *(logits, rows, chosen, *scratch, records, stride, tiles, top),
            TILES_PAD=triton.next_power_of_2(tiles),
            BEST_PAD=best_pad,
            INDEXED=indexed,
            num_warps=num_warps_for(best_pad),
        )
