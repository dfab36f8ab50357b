"""Decode attention over the paged pool in plain torch, row by row: the oracle of `kernels.paged_decode`."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
    return paged_decode(query, keys, values, rows, positions, page_table, page_size, scale)


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    positions: Tensor,
    page_table: Tensor,
    page_size: int,
    scale: float,
) -> Tensor:
    """Attention of one new token a row over positions 0 to `positions` of its row, computed in float32.

    query: [B, heads, D]; keys, values: [places, kv_heads, D]; rows, positions: [B] integers; page_table:
    [R, pages_per_row]. Returns [B, heads, D] float32. Reads lengths on the host: for tests only.
    """
    out = torch.empty_like(query, dtype=torch.float32)
    kv_heads = keys.shape[1]
    for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        n = torch.arange(position + 1, device=query.device)
        place = page_table[row, n // page_size].long() * page_size + n % page_size
        q = query[i].float().view(kv_heads, -1, query.shape[-1])
        k, v = keys[place].float().transpose(0, 1), values[place].float().transpose(0, 1)
        weights = (q @ k.transpose(1, 2) * scale).softmax(-1)
        out[i] = (weights @ v).reshape(query.shape[1:])
    return out
