"""Ranks of tokens: their order, their contents, and the ranks that mark tiles as unusable."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.sampling.scratch import NOTHING
from tandem.engine_core.kernels.sampling.sort_key import (
    ALL_MASKED,
    EMPTY,
    INVALID,
    MAX_VOCAB,
    best_of,
    best_of_tile,
    check_logits,
    classify_tile,
    load_logits,
    rank_id,
    rank_value,
    sortable_bits,
    to_rank,
    token_of,
    value_of_bits,
    write_token,
)
from tests.support.token_ranks import best_of_tiles

# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
LARGEST, SMALLEST = torch.finfo(torch.float32).max, 2.0**-149
VALUES = [-torch.inf, -LARGEST, -1.5, -SMALLEST, -0.0, 0.0, SMALLEST, 1.0, 1.0 + 2**-23, 1.5, LARGEST, torch.inf]
IDS = [0, 1, 2, 1023, 1024, MAX_VOCAB - 1]


@triton.jit
def _ranks_kernel(x_ptr, ids_ptr, bits_ptr, restored_ptr, ranks_ptr, values_ptr, found_ids_ptr, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.arange(0, BLOCK)
    x, ids = tl.load(x_ptr + offsets), tl.load(ids_ptr + offsets)
    bits = sortable_bits(x)
    tl.store(bits_ptr + offsets, bits)
    tl.store(restored_ptr + offsets, value_of_bits(bits))
    ranks = to_rank(x, ids)
    tl.store(ranks_ptr + offsets, ranks)
    tl.store(values_ptr + offsets, rank_value(ranks))
    tl.store(found_ids_ptr + offsets, rank_id(ranks))


def test_ranks_order_by_value_then_by_lower_id_and_hold_both(device: str) -> None:
    pairs = [(value, token) for value in VALUES for token in IDS]
    x = torch.zeros(128, device=device)
    ids = torch.zeros(128, dtype=torch.int32, device=device)
    x[: len(pairs)] = torch.tensor([value for value, _ in pairs])
    ids[: len(pairs)] = torch.tensor([token for _, token in pairs])
    bits, found_ids = torch.zeros_like(ids), torch.zeros_like(ids)
    restored, values = torch.zeros_like(x), torch.zeros_like(x)
    ranks = torch.zeros(128, dtype=torch.int64, device=device)
    _ranks_kernel[(1,)](x, ids, bits, restored, ranks, values, found_ids, BLOCK=128)
    assert torch.equal(bits[:, None] > bits, x[:, None] > x)
    assert torch.equal(restored.view(torch.int32), (x + 0.0).view(torch.int32)), "but for the sign of zero"
    assert torch.equal(values.view(torch.int32), restored.view(torch.int32))
    assert torch.equal(found_ids, ids)
    ahead = (x[:, None] > x) | ((x[:, None] == x) & (ids[:, None] < ids))
    assert torch.equal(ranks[:, None] > ranks, ahead)
    assert NOTHING.value < EMPTY.value < ranks.min()
    assert ranks[(x == -torch.inf) & (ids == 0)].tolist() == [ALL_MASKED.value]
    assert ranks[x == torch.inf].max() < INVALID.value


@triton.jit
def _judge_kernel(
    logits_ptr,
    kept_ptr,
    ranks_ptr,
    values_ptr,
    tokens_ptr,
    logit_stride,
    vocab,
    BLOCK: tl.constexpr,  # noqa: N803
):
    index = tl.program_id(0)
    ids = tl.arange(0, BLOCK)
    x = load_logits(logits_ptr + index * logit_stride, ids, ids < vocab)
    _, largest = best_of_tile(x, logits_ptr + index * logit_stride, 0, vocab)
    kept = load_logits(kept_ptr + index * logit_stride, ids, ids < vocab)
    best, _ = best_of_tile(kept, kept_ptr + index * logit_stride, 0, vocab)
    rank = classify_tile(best, largest)
    tl.store(ranks_ptr + index, rank)
    tl.store(values_ptr + index, rank_value(rank))
    tl.store(tokens_ptr + index, token_of(rank))


def judged(logits: Tensor, keep: Tensor) -> tuple[list[int], list[float], list[int]]:
    ranks = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    values, tokens = torch.zeros_like(ranks, dtype=torch.float32), torch.zeros_like(ranks, dtype=torch.int32)
    kept = torch.full((len(logits), logits.stride(0)), torch.nan, dtype=logits.dtype, device=logits.device)
    kept[:, : logits.shape[1]] = logits.masked_fill(~keep, -torch.inf)
    _judge_kernel[(len(logits),)](logits, kept, ranks, values, tokens, logits.stride(0), logits.shape[1], BLOCK=128)
    return ranks.tolist(), values.tolist(), tokens.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiles_without_a_usable_logit_are_marked_before_what_is_kept_of_them(dtype: torch.dtype, device: str) -> None:
    """The vocabulary fills neither the tile nor a row of memory: elements past it must not be read."""
    vocab = 99
    memory = torch.full((8, 104), torch.nan, dtype=dtype, device=device)
    logits = memory[:, :vocab]
    logits[:] = -7.0
    logits[:, [40, 70]] = 2.0
    keep = torch.ones(8, vocab, dtype=torch.bool, device=device)
    logits[1, 98] = torch.nan
    logits[2, 0], keep[2] = torch.inf, False
    logits[3] = -torch.inf
    logits[4, :] = -torch.inf
    logits[4, 5] = torch.nan
    keep[5] = False
    logits[6], keep[6] = -torch.inf, False
    keep[7, :71] = False
    ranks, values, tokens = judged(logits, keep)
    assert tokens == [40, -1, -1, -1, -1, 0, -1, 71]
    assert [rank == INVALID.value for rank in ranks] == [number in (1, 2, 4) for number in range(8)]
    assert [rank == EMPTY.value for rank in ranks] == [number in (3, 6) for number in range(8)]
    assert ranks[5] == ALL_MASKED.value
    assert [value for value in values if value == value] == [2.0, -torch.inf, -torch.inf, -torch.inf, -7.0]
    assert [number for number, value in enumerate(values) if value != value] == [1, 2, 4]


@triton.jit
def _best_kernel(logits_ptr, tile_ranks_ptr, ranks_ptr, largest_ptr, vocab, BLOCK: tl.constexpr):  # noqa: N803
    tile, index = tl.program_id(0), tl.program_id(1)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits_ptr + index * vocab, ids, ids < vocab)
    best, largest = best_of_tile(x, logits_ptr + index * vocab, tile * BLOCK, vocab)
    place = index * tl.num_programs(0) + tile
    tl.store(tile_ranks_ptr + place, best)
    tl.store(ranks_ptr + place, best_of(x, ids))
    tl.store(largest_ptr + place, largest)


@pytest.mark.parametrize("vocab", [1, 8, 64, 65, 187])
def test_the_best_of_a_tile_is_its_largest_logit_at_the_lowest_id(vocab: int, device: str) -> None:
    """One token with the maximum, several in one group of adjacent ones or more, and all of them."""
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)).to(device)
    logits[1], logits[2] = logits[1].round(), 0.0
    logits[2, 1::2] = -0.0
    logits[3, -1], logits[4, :-1] = 9.0, -9.0
    tiles = triton.cdiv(vocab, 64)
    tile_ranks, ranks = (torch.zeros(5, tiles, dtype=torch.int64, device=device) for _ in "12")
    largest = torch.zeros(5, tiles, device=device)
    _best_kernel[(tiles, 5)](logits, tile_ranks, ranks, largest, vocab, BLOCK=64)
    assert torch.equal(tile_ranks, best_of_tiles(logits, 64)) and torch.equal(tile_ranks, ranks)
    assert torch.equal(largest.amax(1), logits.amax(1))


@triton.jit
def _write_kernel(sampled_ptr, tokens_ptr, lengths_ptr, rows_ptr, positions_ptr, drawn_ptr, token_stride, max_len):
    index = tl.program_id(0)
    row, position = tl.load(rows_ptr + index).to(tl.int64), tl.load(positions_ptr + index)
    token = tl.load(drawn_ptr + index)
    write_token(sampled_ptr, tokens_ptr, lengths_ptr, token_stride, max_len, index, row, position, token)


def test_tokens_are_written_within_their_rows_alone(device: str) -> None:
    """The last position, one past it, no token, padding at its own position, and padding elsewhere."""

    def column(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    rows, positions, drawn = column(1, 2, 3, 0, 0), column(4, 5, 0, 0, 3), column(11, 12, -1, 14, 15)
    tokens = torch.full((4, 8), -7, dtype=torch.int32, device=device)
    lengths, sampled = column(1, 6, 6, 1), column(0, 0, 0, 0, 0)
    _write_kernel[(5,)](sampled, tokens, lengths, rows, positions, drawn, tokens.stride(0), 6)
    assert sampled.tolist() == drawn.tolist()
    assert lengths.tolist() == [1, 6, 6, 2]
    written = {(row, place): int(tokens[row, place]) for row, place in (tokens != -7).nonzero().tolist()}
    assert written == {(1, 5): 11, (3, 1): 0, (0, 1): 14}


def test_logits_that_ranks_cannot_hold_are_refused() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_logits(torch.empty(2, MAX_VOCAB, dtype=dtype, device="meta"))
    for vocab in (0, MAX_VOCAB + 1):
        with pytest.raises(ValueError, match=rf"\b1 to {MAX_VOCAB} .*\b{vocab}$"):
            check_logits(torch.empty(2, vocab, device="meta"))
    with pytest.raises(ValueError, match=r"\(5,\) .*\(1,\) .*torch\.float32"):
        check_logits(torch.empty(5, device="meta"))
