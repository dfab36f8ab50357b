"""Attention over the paged pool in plain torch, row by row: the oracle of the attention kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine_core.kernels.page_table import PageTable


def paged_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    work: Sequence[tuple[int, int]],
    page_table: PageTable,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend causally in float32, with every query as a decode row.

    query: [T, heads, D], rows one after another; keys, values: [slots, kv_heads, D]; work: for each row of the page
    table, its first query's position and its number of queries; scale, window, softcap: as in `LayerAttention`. Returns
    [T, heads, D] float32.
    """
    rows = torch.tensor([row for row, (_, queries) in enumerate(work) for _ in range(queries)])
    positions = torch.cat([torch.arange(start, start + queries) for start, queries in work])
    return paged_decode(query, keys, values, rows, positions, page_table, scale, window, softcap)


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    positions: Tensor,
    page_table: PageTable,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend in float32 with one new token per row to positions up to and including its own.

    query: [B, heads, D]; keys, values: [slots, kv_heads, D]; rows, positions: [B] integers; scale, window, softcap: as
    in `LayerAttention`. Returns [B, heads, D] float32. Reads lengths on the host.
    """
    out = torch.empty_like(query, dtype=torch.float32)
    heads = (keys.shape[1], -1)
    grouped, found = query.float().unflatten(1, heads), out.unflatten(1, heads)
    own, last = rows.tolist(), positions.tolist()
    known = sorted(set(own))
    slots_of = dict(zip(known, page_table.slots_between(known, 0, max(last, default=-1) + 1), strict=True))
    for i, (row, position) in enumerate(zip(own, last, strict=True)):
        slots = slots_of[row][0 if window is None else max(0, position + 1 - window) : position + 1]
        k, v = keys[slots].float().transpose(0, 1), values[slots].float().transpose(0, 1)
        scores = grouped[i] @ k.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        found[i] = scores.softmax(-1) @ v
    return out
