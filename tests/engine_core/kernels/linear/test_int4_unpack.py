"""Unpacking of int4 values: every value at every index, with every zero point."""

import pytest
import torch
import triton
import triton.language as tl

from tandem.engine_core.kernels.linear.int4_unpack import unpack_int4


@triton.jit
def _levels_kernel(words_ptr, zeros_ptr, out_ptr, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.arange(0, BLOCK)
    levels = unpack_int4(tl.load(words_ptr + offsets), tl.load(zeros_ptr + offsets), out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets[:, None] * 8 + tl.arange(0, 8)[None, :], tl.reshape(levels, [BLOCK, 8]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_int4_values_minus_zero_points_are_exact_at_every_index(dtype: torch.dtype, device: str) -> None:
    """The bits of a result's index are bits 2, 0 and 1 of the value's index."""
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("Triton's interpreter does not convert integers to bfloat16")
    count = 1024
    levels = torch.arange(8 * count).view(count, 8) % 16
    levels = (levels + torch.arange(count)[:, None] * 5 + torch.arange(8) * 3) % 16
    zeros = torch.arange(count) % 64
    words = (levels << (4 * torch.arange(8))).sum(1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    out = torch.full((count, 8), torch.nan, dtype=dtype, device=device)
    _levels_kernel[(1,)](words.to(device), zeros.int().to(device), out, BLOCK=count)
    places = [4 * (index >> 2) + 2 * (index & 1) + (index >> 1 & 1) for index in range(8)]
    expected = (levels - zeros[:, None])[:, places]
    assert torch.equal(out.cpu().float(), expected.float())
