"""The running softmax of the attention kernels, against a softmax over all keys at once."""
# ruff: noqa: N803

import pytest
import torch
import triton
import triton.language as tl

from tandem.engine_core.kernels.attention.online_softmax import attend, kernel_cap, kernel_scale, max_stages
from tests.fakes.gpus import H200, RTX_5090

# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
QUERIES, DIM, BLOCK, BLOCKS = 16, 32, 16, 3


@triton.jit
def _attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    seen_ptr,
    out_ptr,
    sums_ptr,
    scale,
    CAP: tl.constexpr,
    BLOCKS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
):
    rows, d = tl.arange(0, QUERIES), tl.arange(0, DIM)
    q = tl.load(q_ptr + rows[:, None] * DIM + d[None, :])
    seen = tl.load(seen_ptr + rows)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    for block in range(BLOCKS):
        n = block * BLOCK + tl.arange(0, BLOCK)
        k = tl.load(k_ptr + n[:, None] * DIM + d[None, :])
        v = tl.load(v_ptr + n[:, None] * DIM + d[None, :])
        visible = n[None, :] < seen[:, None]
        best, weight, acc = attend(q, k, v, visible, scale, best, weight, acc, CAP, "ieee")
    tl.store(out_ptr + rows[:, None] * DIM + d[None, :], acc / weight[:, None])
    tl.store(sums_ptr + rows, best + tl.log2(weight))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("size", [1.0, 200.0])
def test_blocks_one_after_another_give_the_softmax_over_all_of_them(
    softcap: float | None, size: float, device: str
) -> None:
    """Each query sees a different number of keys, from one on; large scores neither overflow nor exceed the cap."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(count, DIM, generator=generator).to(device) for count in (QUERIES, *[BLOCK * BLOCKS] * 2))
    q, scale = q * size, DIM**-0.5
    seen = torch.linspace(1, BLOCK * BLOCKS, QUERIES).int().to(device)
    out, sums = torch.zeros(QUERIES, DIM, device=device), torch.zeros(QUERIES, device=device)
    _attend_kernel[(1,)](
        q,
        k,
        v,
        seen,
        out,
        sums,
        kernel_scale(scale, softcap),
        CAP=kernel_cap(softcap),
        BLOCKS=BLOCKS,
        QUERIES=QUERIES,
        BLOCK=BLOCK,
        DIM=DIM,
    )
    scores = q.double() @ k.double().t() * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(torch.arange(BLOCK * BLOCKS, device=device) >= seen[:, None], -torch.inf)
    torch.testing.assert_close(out.double(), scores.softmax(1) @ v.double(), atol=1e-4, rtol=1e-4)
    exponents = scores.logsumexp(1) / torch.tensor(2.0).double().log().to(device)
    torch.testing.assert_close(sums.double(), exponents, atol=1e-4, rtol=1e-6)


def test_8_bit_operands_of_warpgroup_instructions_take_a_buffer() -> None:
    """64 rows of 128 elements over 64 positions: 48 KiB are resident, and each stage loads keys and values."""
    query, keys = torch.empty(1, 4, 128, dtype=torch.bfloat16), torch.empty(8, 1, 128, dtype=torch.bfloat16)
    narrow = keys.to(torch.float8_e4m3fn)
    held = 64 * (128 + 64) * 2
    assert max_stages(64, 64, query, keys, H200) == H200.max_stages(64 * 128 * 4, held, warpgroup=True)
    assert max_stages(63, 64, query, keys, H200) == H200.max_stages(64 * 128 * 4, held - 384, warpgroup=False)
    converted = H200.max_stages(64 * 128 * 2, held + 64 * 128 * 4, warpgroup=True)
    assert max_stages(64, 64, query, narrow, H200) == converted
    assert max_stages(64, 64, query, narrow, RTX_5090) < converted
