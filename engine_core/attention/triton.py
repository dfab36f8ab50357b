"""Attention through the project's own kernels: decode rows alone without any planning, and rows of any lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_core.attention.base import Span
from engine_core.kernels.paged_decode import paged_decode
from engine_core.kernels.paged_prefill import WORDS, paged_prefill


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The plan of a decode step: where the kernel finds everything. A captured graph keeps reading these places."""

    rows: Tensor
    """[B] int32, rows of the page table."""
    positions: Tensor
    """[B] int32, position of each row's one query."""
    page_table: Tensor
    """[R, pages_per_row] int32."""
    page_size: int
    splits: int
    """Programs that share one row's positions."""


class TritonDecode:
    """An `AttentionBackend` for steps of decode rows alone; their plan is a `DecodeRows`."""

    def plan(self, spans: Sequence[Span], pages: Tensor, page_size: int) -> DecodeRows:
        """There is nothing to plan on the host; the runtime makes the `DecodeRows` of a slot once."""
        raise TypeError("decode steps are not planned; give the batch a DecodeRows")

    def run(
        self, plan: DecodeRows, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor | None = None
    ) -> Tensor:
        """As in `AttentionBackend`. out: where to write, shaped like query."""
        return paged_decode(
            query,
            keys,
            values,
            plan.rows,
            plan.positions,
            plan.page_table,
            plan.page_size,
            scale,
            plan.splits,
            pdl=True,
            out=out,
        )


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """The plan of a step of rows of any lengths."""

    tiles: Tensor
    """As in `paged_prefill`."""
    pages: Tensor
    """[B, max_pages] int32."""
    page_size: int


class TritonRagged:
    """An `AttentionBackend` for rows of any lengths, where FlashInfer lacks the dtype or the shape.

    One instance a slot, because planning writes into pinned memory that the device still reads (I6).
    """

    def __init__(self, queries: int, host: Tensor, tiles: Tensor) -> None:
        """queries: of one tile; host: pinned int32, as large as tiles; tiles: [N, WORDS] int32 on the device."""
        self.queries = queries
        self.host = host
        self.view = host.numpy()
        self.tiles = tiles

    @classmethod
    def allocate(
        cls,
        pinned: Callable[..., Tensor],
        device: torch.device,
        queries: int,
        max_rows: int,
        max_step_tokens: int,
    ) -> "TritonRagged":
        """pinned: makes int32 host memory of a shape that copies without synchronising."""
        # Every row may end with a tile that is not full.
        most = max_rows + max_step_tokens // queries
        return cls(queries, pinned(most, WORDS), torch.zeros(most, WORDS, dtype=torch.int32, device=device))

    def plan(self, spans: Sequence[Span], pages: Tensor, page_size: int) -> RaggedRows:
        """As in `AttentionBackend`."""
        lengths = np.array([span.length for span in spans], dtype=np.int32)
        per_row = -(-lengths // self.queries)
        row = np.repeat(np.arange(len(spans), dtype=np.int32), per_row)
        total = len(row)
        # Queries of its row that come before each tile.
        before = (np.arange(total) - np.repeat(np.cumsum(per_row) - per_row, per_row)) * self.queries
        view = self.view[:total]
        view[:, 0] = row
        view[:, 1] = np.array([span.offset for span in spans], dtype=np.int32)[row] + before
        view[:, 2] = np.array([span.start for span in spans], dtype=np.int32)[row] + before
        view[:, 3] = lengths[row] - before
        tiles = self.tiles[:total]
        tiles.copy_(self.host[:total], non_blocking=True)
        return RaggedRows(tiles, pages, page_size)

    def run(self, plan: RaggedRows, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """As in `AttentionBackend`."""
        return paged_prefill(query, keys, values, plan.tiles, plan.pages, plan.page_size, scale)
