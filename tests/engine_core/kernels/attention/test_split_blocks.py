"""Division of blocks among programs and combination of partial results, against plain arithmetic."""
# ruff: noqa: N803

import pytest
import torch
import triton
import triton.language as tl

from tandem.engine_core.kernels.attention.split_blocks import combine_splits, split_blocks

# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BLOCK = 16


@triton.jit
def _split_kernel(cases_ptr, found_ptr, BLOCK: tl.constexpr):
    case = tl.program_id(0)
    length, lowest = tl.load(cases_ptr + 4 * case), tl.load(cases_ptr + 4 * case + 1)
    splits, least = tl.load(cases_ptr + 4 * case + 2), tl.load(cases_ptr + 4 * case + 3)
    first, last, used = split_blocks(length, lowest, tl.program_id(1), splits, least, BLOCK)
    place = found_ptr + (case * tl.num_programs(1) + tl.program_id(1)) * 3
    tl.store(place, first)
    tl.store(place + 1, last)
    tl.store(place + 2, used)


def test_programs_in_use_share_the_blocks_of_a_row_without_gap_or_overlap(device: str) -> None:
    """One position, a window within one block, whole blocks, more programs than blocks, and minimum shares."""
    programs = 7
    cases = [
        (length, lowest, splits, least)
        for length, lowest in ((1, 0), (16, 0), (17, 0), (160, 0), (163, 5), (163, 16), (163, 162), (1000, 500))
        for splits in (1, 2, 3, programs)
        for least in (1, 2, 5)
    ]
    found = torch.zeros(len(cases), programs, 3, dtype=torch.int32, device=device)
    _split_kernel[(len(cases), programs)](torch.tensor(cases, dtype=torch.int32, device=device), found, BLOCK=BLOCK)
    for (length, lowest, splits, least), ranges in zip(cases, found.tolist(), strict=True):
        used = ranges[0][2]
        assert 1 <= used <= splits
        blocks = [block for first, last, _ in ranges[:used] for block in range(first, last)]
        assert blocks == list(range(lowest // BLOCK, -(-length // BLOCK)))
        shares = [last - first for first, last, _ in ranges[:used]]
        assert all(share >= least for share in shares[:-1]) and shares[-1] > 0
        assert max(shares) == max(least, -(-len(blocks) // splits)) or used == 1
        assert all(last <= first for first, last, _ in ranges[used:]), "programs beyond have no blocks"


@triton.jit
def _combine_kernel(
    partial_ptr,
    log_sums_ptr,
    out_ptr,
    used,
    splits,
    beyond,
    EXTRA: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    out = combine_splits(partial_ptr, log_sums_ptr, used, splits, beyond, GROUP, EXTRA, GROUP, ROWS, D, WIDE, CHUNK)
    tl.store(out_ptr + tl.arange(0, ROWS)[:, None] * WIDE + tl.arange(0, WIDE)[None, :], out)


@pytest.mark.parametrize(("used", "splits", "beyond"), [(1, 4, 0), (3, 4, 0), (7, 7, 0), (6, 2, 5)])
@pytest.mark.parametrize("head_dim", [32, 24])
def test_outputs_are_weighed_by_their_sums(used: int, splits: int, beyond: int, head_dim: int, device: str) -> None:
    """Several chunks of splits, extra splits at an offset, groups that fill no tile, and empty splits.

    Memory between and after them is NaN; heads beyond the group are 0.
    """
    group, rows, wide = 3, 4, 32
    generator = torch.Generator().manual_seed(used)
    partial = torch.full((16, group, head_dim), torch.nan)
    log_sums = torch.full((16, group), torch.nan)
    places = [number if number < splits or not beyond else number + beyond for number in range(used)]
    partial[places] = torch.randn(used, group, head_dim, generator=generator)
    log_sums[places] = torch.randn(used, group, generator=generator) * 40
    if used > 1:
        log_sums[places[1], 0] = -torch.inf
    out = torch.full((rows, wide), torch.nan, device=device)
    _combine_kernel[(1,)](
        partial.to(device),
        log_sums.to(device),
        out,
        used,
        splits,
        beyond,
        EXTRA=beyond > 0,
        GROUP=group,
        ROWS=rows,
        D=head_dim,
        WIDE=wide,
        CHUNK=4,
    )
    shares = (log_sums[places].double() * torch.tensor(2.0).double().log()).softmax(0)
    expected = (partial[places].double() * shares[..., None]).sum(0)
    torch.testing.assert_close(out[:group, :head_dim].cpu().double(), expected, atol=1e-5, rtol=1e-5)
    assert not out[group:].any() and not out[:, head_dim:].any()
