"""Attention of rows of any lengths over the paged pool in plain torch: the oracle of `kernels.paged_prefill`.

torch's own attention is none on CUDA: with a head_dim above 128, key heads repeated by a stride of 0 and a length one
above a multiple of 32, its memory-efficient kernel gets the last key wrong (pytorch/pytorch#191937).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine_core.kernels.reference import attention as reference_decode


def paged_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    work: Sequence[tuple[int, int]],
    page_table: Tensor,
    page_size: int,
    scale: float,
) -> Tensor:
    """Causal attention, computed in float32: every query is a decode row of its own.

    query: [T, heads, D], rows one after another; keys, values: [places, kv_heads, D]; work: of each row of the page
    table, its first query's position and how many queries it has. Returns [T, heads, D] float32. For tests only.
    """
    rows = torch.tensor([row for row, (_, queries) in enumerate(work) for _ in range(queries)])
    positions = torch.cat([torch.arange(start, start + queries) for start, queries in work])
    return reference_decode.paged_decode(query, keys, values, rows, positions, page_table, page_size, scale)
