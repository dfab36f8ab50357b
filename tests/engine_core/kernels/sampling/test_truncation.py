"""Truncation parameters of a row as read by the kernels, and the mask of kept tokens."""

import math

import pytest
import torch
import triton
import triton.language as tl

from tandem.engine_core.kernels.sampling.inputs import FLOAT_COLUMNS, INT_COLUMNS
from tandem.engine_core.kernels.sampling.sort_key import ALL_MASKED, EMPTY
from tandem.engine_core.kernels.sampling.truncation import load_truncation, ranks_at_least
from tests.support.sampling_case import MIN_P, TOP_K, TOP_P
from tests.support.token_ranks import rank_of

# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
VOCAB = 1001


@triton.jit
def _load_kernel(ints_ptr, floats_ptr, top_k_ptr, found_ptr, vocab):
    row = tl.program_id(0)
    top_k, top_p, least = load_truncation(ints_ptr, floats_ptr, row, vocab)
    tl.store(top_k_ptr + row, top_k)
    tl.store(found_ptr + 2 * row, top_p)
    tl.store(found_ptr + 2 * row + 1, least)


def test_parameters_that_drop_nothing_are_0_and_minus_infinity(device: str) -> None:
    """Top-k from the vocabulary's size on, and min-p of 0; a min-p below all weights still has a bound."""
    top_k = [0, 1, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1]
    min_p = [0.0, 2.0**-149, 0.05, 0.5, 1.0, 1 - 2**-24]
    top_p = [1.0, 0.0, 0.5, 2.0**-149, 1 - 2**-24, 0.9]
    ints = torch.full((6, len(INT_COLUMNS)), -9, device=device)
    floats = torch.full((6, len(FLOAT_COLUMNS)), torch.nan, device=device)
    ints[:, TOP_K] = torch.tensor(top_k)
    floats[:, MIN_P], floats[:, TOP_P] = torch.tensor(min_p), torch.tensor(top_p)
    found_k, found = torch.zeros(6, dtype=torch.int64, device=device), torch.zeros(6, 2, device=device)
    _load_kernel[(6,)](ints, floats, found_k, found, VOCAB)
    assert found_k.tolist() == [0, 1, VOCAB - 1, 0, 0, 0]
    assert torch.equal(found[:, 0], floats[:, TOP_P])
    bounds = found[:, 1].tolist()
    assert bounds[0] == -math.inf
    assert bounds[1] == -126.0, "where weights are no normal numbers"
    assert bounds[2] == pytest.approx(math.log2(0.05), rel=1e-6)
    assert bounds[3:5] == [-1.0, 0.0]
    assert -2e-7 < bounds[5] <= 0.0, "the best token, of which y is 0, always reaches it"


@triton.jit
def _ranks_kernel(x_ptr, least_ptr, stays_ptr, BLOCK: tl.constexpr):  # noqa: N803
    ids = tl.arange(0, BLOCK)
    least = tl.load(least_ptr + tl.program_id(0))
    stays = ranks_at_least(tl.load(x_ptr + ids), ids, least)
    tl.store(stays_ptr + tl.program_id(0) * BLOCK + ids, stays.to(tl.int32))


def test_tokens_down_to_a_rank_are_those_whose_ranks_compare_so(device: str) -> None:
    """With many equal values, both zeros, and adjacent floats; each token's rank, and those of tiles."""
    values = torch.tensor([1.0, 1.0 + 2**-23, -0.0, 0.0, 2.0**-149, -2.0, -torch.inf, 3e38, torch.inf])
    x = values[torch.randint(0, 9, (1, 128), generator=torch.Generator().manual_seed(2))].to(device)
    ranks = rank_of(x)[0]
    least = torch.cat([ranks, torch.tensor([EMPTY.value, ALL_MASKED.value], device=device)])
    stays = torch.zeros(len(least), 128, dtype=torch.int32, device=device)
    _ranks_kernel[(len(least),)](x, least, stays, BLOCK=128)
    assert torch.equal(stays != 0, ranks >= least[:, None])
    assert stays[128].all(), "EMPTY is below every token"
