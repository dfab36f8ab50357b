"""A pool in which only the pages that a step may read hold numbers: all else is NaN.

Page tables keep the ids of pages that were given up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine_core.attention.base import LayerAttention, Span
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.page_counts import PageColumns, page_columns


@dataclass(frozen=True)
class WindowPool:
    """Keys and values of rows for two KV groups, one of all positions and one of a window."""

    spans: list[Span]
    tables: list[PageTable]
    """Views of one tensor, which has a column more than they need."""
    keys: Tensor
    values: Tensor
    """[slots, kv_heads, head_dim], of a layer of either group."""
    dense: list[tuple[Tensor, Tensor]]
    """Keys and values of each row, [start + length, kv_heads, head_dim]."""
    columns: tuple[PageColumns, ...]

    def expected(self, query: Tensor, layer: LayerAttention) -> Tensor:
        """Return the attention of all queries [T, heads, head_dim], in float64, computed row by row."""
        parts = []
        for span, (keys, values) in zip(self.spans, self.dense, strict=True):
            own = query[span.offset : span.offset + span.length].double()
            group = own.shape[1] // keys.shape[1]
            k, v = (part.double().repeat_interleave(group, 1) for part in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", own, k) * layer.scale
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            positions = torch.arange(span.start, span.start + span.length, device=query.device)
            age = positions[:, None] - torch.arange(len(keys), device=query.device)
            scores = scores.masked_fill((age < 0) | (age >= (layer.window or len(keys))), -torch.inf)
            parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        return torch.cat(parts)


def window_pool(
    work: Sequence[tuple[int, int]],
    window: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    *,
    max_len: int,
    chunk: int,
    stride: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> WindowPool:
    """Fill a pool for a step.

    work: start and length of each row; chunk: maximum length of a row; stride: from one page of a layer to the next, in
    pages.
    """
    generator = torch.Generator().manual_seed(seed)
    columns = page_columns((None, window), page_size, max_len, chunk)
    used = [ceil_div(start + length, page_size) for start, length in work]
    total = 2 * sum(used)
    free = (torch.randperm(total, generator=generator) + 1).tolist()
    # Stale ids of any page, in unused columns too.
    pages = torch.randint(
        total + 1, (len(work), sum(own.count for own in columns) + 1), generator=generator, dtype=torch.int32
    )
    pool = torch.full((2, (total + 1) * page_size * stride, kv_heads, head_dim), torch.nan)
    # The padding page.
    pool[:, :page_size] = 0
    spans, dense, offset = [], [], 0
    for row, (start, length) in enumerate(work):
        end = start + length
        dense.append(torch.randn(2, end, kv_heads, head_dim, generator=generator).to(dtype))
        for own, seen in zip(columns, (end, window), strict=True):
            for index in range(max(0, start + 1 - seen) // page_size, used[row]):
                page = free.pop()
                column = own.first + (index % own.ring if own.ring else index)
                pages[row, column] = page
                if own.ring:
                    pages[row, column + own.ring] = page
                held = dense[row][:, index * page_size : (index + 1) * page_size]
                first = page * page_size * stride
                pool[:, first : first + held.shape[1]] = held
        spans.append(Span(row, offset, start, length))
        offset += length
    pages, pool = pages.to(device), pool.to(dtype).to(device)
    tables = [
        PageTable(pages[:, own.first : own.first + own.count], page_size, page_size * stride, kept, own.ring)
        for own, kept in zip(columns, (None, window), strict=True)
    ]
    moved = [(part[0].to(device), part[1].to(device)) for part in dense]
    return WindowPool(spans, tables, pool[0], pool[1], moved, columns)


def query_of(pool: WindowPool, heads: int, seed: int = 1) -> Tensor:
    """Return random queries for a step, [T, heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(span.length for span in pool.spans)
    query = torch.randn(tokens, heads, pool.keys.shape[2], generator=generator)
    return query.to(pool.keys.dtype).to(pool.keys.device)
