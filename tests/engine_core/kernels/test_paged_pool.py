"""Addressing of the paged pool inside kernels, and rejected layouts."""

import pytest
import torch
import triton
import triton.language as tl

from tandem.engine_core.kernels.paged_pool import (
    HEAD_DIMS,
    check_band,
    check_groups,
    check_head_dim,
    check_heads,
    head_width,
    in_head,
    slots_of,
)


@triton.jit
def _address_kernel(pages_ptr, positions_ptr, slots_ptr, mask_ptr, D: tl.constexpr, WIDE: tl.constexpr):  # noqa: N803
    rows, d = tl.arange(0, 4), tl.arange(0, WIDE)
    tl.store(slots_ptr + rows, slots_of(tl.load(pages_ptr + rows), tl.load(positions_ptr + rows), 16, 1000))
    mask = tl.zeros([4, WIDE], tl.int1) | in_head(rows < 3, d, D, WIDE)
    tl.store(mask_ptr + rows[:, None] * WIDE + d[None, :], mask.to(tl.int32))


@pytest.mark.parametrize("head_dim", [64, 96])
def test_slots_take_64_bits_and_tiles_end_with_the_head(head_dim: int, device: str) -> None:
    wide = head_width(head_dim)
    pages, positions = torch.tensor([[0, 3, 2**31 - 1, 7], [0, 15, 33, 16]], dtype=torch.int32, device=device)
    slots = torch.zeros(4, dtype=torch.int64, device=device)
    mask = torch.zeros(4, wide, dtype=torch.int32, device=device)
    _address_kernel[(1,)](pages, positions, slots, mask, D=head_dim, WIDE=wide)
    assert slots.tolist() == [0, 3015, 1000 * (2**31 - 1) + 1, 7000]
    expected = torch.zeros(4, wide, dtype=torch.int32, device=device)
    expected[:3, :head_dim] = 1
    assert torch.equal(mask, expected)


def test_heads_without_a_kernel_are_refused_with_their_numbers() -> None:
    assert [head_width(head_dim) for head_dim in HEAD_DIMS] == [32, 64, 128, 128, 256]
    for head_dim in HEAD_DIMS:
        check_head_dim(head_dim)
    with pytest.raises(ValueError, match=r"head_dim 80\b.*\(32, 64, 96, 128, 256\)"):
        check_head_dim(80)
    check_groups(12, 4)
    with pytest.raises(ValueError, match=r"^10 query heads\b.*\b4 KV heads\b"):
        check_groups(10, 4)


def test_a_band_shows_at_least_one_position_and_a_cap_is_positive() -> None:
    check_band(None, None)
    check_band(1, 0.1)
    with pytest.raises(ValueError, match=r"\bwindow\b.* 0 positions"):
        check_band(0, None)
    for softcap in (0.0, -30.0):
        with pytest.raises(ValueError, match=rf"\bsoft cap\b.* {softcap}\b"):
            check_band(None, softcap)


def test_heads_in_other_layouts_are_refused() -> None:
    """Slots may be strided, as queries inside a projection are, but keys and values alike."""
    pool = torch.empty(20, 2, 2, 32)
    check_heads(torch.empty(3, 8, 32)[:, 2:6], pool[::2, 0], pool[::2, 1])
    query, keys = torch.empty(3, 4, 32), torch.empty(10, 2, 32)
    for wrong in (
        (torch.empty(3, 32, 4).transpose(1, 2), keys, keys),
        (torch.empty(3, 4, 64), keys, keys),
        (query, keys, torch.empty(20, 2, 32)[::2]),
        (query, torch.empty(10, 4, 32)[:, ::2], keys),
    ):
        with pytest.raises(ValueError, match="contiguous"):
            check_heads(*wrong)
