"""The oracle of paged attention, against torch's attention over the same keys and values in dense tensors."""

import pytest
import torch
from torch.nn import functional

from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.reference.attention import paged_decode, paged_prefill


@pytest.mark.parametrize("window", [None, 1, 6])
def test_prompts_over_pages_equal_dense_causal_attention(window: int | None) -> None:
    """Rows that begin at 0 and after cached tokens, on pages out of order."""
    torch.manual_seed(1)
    kv_heads, group, dim, page_size = 2, 3, 8, 4
    pages = torch.tensor([[4, 1, 6], [2, 7, 3]], dtype=torch.int32)
    table = PageTable(pages, page_size, 5)
    keys, values = torch.randn(2, 45, kv_heads, dim).unbind()
    work = [(0, 9), (7, 4)]
    query = torch.randn(sum(count for _, count in work), kv_heads * group, dim)
    out = paged_prefill(query, keys, values, work, table, 0.3, window)
    at = 0
    for row, (start, count) in enumerate(work):
        length = start + count
        slots = table.slots(torch.full((length,), row), torch.arange(length))
        k, v = (pool[slots].transpose(0, 1).repeat_interleave(group, 0) for pool in (keys, values))
        own, seen = torch.arange(start, length)[:, None], torch.arange(length)
        mask = (seen <= own) & (seen > own - (window or length + 1))
        q = query[at : at + count].transpose(0, 1)
        dense = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3).transpose(0, 1)
        torch.testing.assert_close(out[at : at + count], dense, atol=1e-5, rtol=1e-5)
        at += count


def test_a_soft_cap_bends_scores_before_the_softmax() -> None:
    table = PageTable(torch.tensor([[1]], dtype=torch.int32), 4, 4)
    keys, values = torch.zeros(8, 1, 1), torch.zeros(8, 1, 1)
    keys[4:6, 0, 0], values[4:6, 0, 0] = torch.tensor([100.0, -100.0]), torch.tensor([1.0, 0.0])
    first, last = torch.tensor([0]), torch.tensor([1])
    out = paged_decode(torch.ones(1, 1, 1), keys, values, first, last, table, 1.0, softcap=2.0)
    assert out.item() == pytest.approx(1 / (1 + torch.tensor(-4.0).exp().item()), rel=1e-6)
