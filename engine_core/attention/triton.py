"""Attention through the project's own kernels: decode rows alone without any planning, and rows of any lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.engine_core.attention.base import PromptAttention, Span
from tandem.engine_core.kernels.attention.paged_decode import paged_decode, split_scratch
from tandem.engine_core.kernels.attention.paged_prefill import WORDS, paged_prefill


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
        self,
        plan: DecodeRows,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        out: Tensor | None = None,
        scratch: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """As in `AttentionBackend`. out: where to write, shaped like query; scratch: as in `paged_decode`."""
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
            scratch=scratch,
        )


def most_tiles(rows: int, tokens: int, queries: int) -> int:
    """Of so many rows that have so many queries together: each may end with a tile that is not full."""
    return rows + tokens // queries


def graph_tiles(rows: int, tokens: int, queries: int) -> int:
    """Most tiles of a step that a graph for so many rows of several tokens has room for."""
    return most_tiles(min(rows, max(1, tokens // 2)), tokens, queries)


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """The plan of a step of rows of any lengths."""

    tiles: Tensor
    """As in `paged_prefill`."""
    pages: Tensor
    """[rows, pages_per_row] int32."""
    page_size: int


class TritonRagged:
    """An `AttentionBackend` for rows of any lengths: where FlashInfer lacks the dtype or the shape, and for few tokens.

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
        most = most_tiles(max_rows, max_step_tokens, queries)
        return cls(queries, pinned(most, WORDS), torch.zeros(most, WORDS, dtype=torch.int32, device=device))

    def plan(self, spans: Sequence[Span], pages: Tensor, page_size: int) -> RaggedRows:
        """As in `AttentionBackend`."""
        return RaggedRows(self.upload(spans), pages, page_size)

    def upload(self, spans: Sequence[Span], room: int = 0) -> Tensor:
        """Brings the spans' tiles to the device, and behind them tiles without work until there are `room`."""
        lengths = np.array([span.length for span in spans], dtype=np.int32)
        per_row = -(-lengths // self.queries)
        span = np.repeat(np.arange(len(spans), dtype=np.int32), per_row)
        total = len(span)
        # Queries of its row that come before each tile.
        before = (np.arange(total) - np.repeat(np.cumsum(per_row) - per_row, per_row)) * self.queries
        places = np.array([(s.row, s.offset, s.start) for s in spans], dtype=np.int32).reshape(-1, 3)[span]
        view = self.view[: max(total, room)]
        view[:total, 0] = places[:, 0]
        view[:total, 1:3] = places[:, 1:] + before[:, None]
        view[:total, 3] = lengths[span] - before
        view[total:] = 0
        tiles = self.tiles[: len(view)]
        tiles.copy_(self.host[: len(view)], non_blocking=True)
        return tiles

    def run(self, plan: RaggedRows, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """As in `AttentionBackend`."""
        return paged_prefill(query, keys, values, plan.tiles, plan.pages, plan.page_size, scale)


class TritonPrompts:
    """A `PromptAttention` of so many tiles at most; those that a step does not need have no work."""

    def __init__(self, ragged: TritonRagged, room: int, splits: int, pages: Tensor, page_size: int) -> None:
        """ragged: of the slot; room: tiles; splits: programs that share one; pages: the page table."""
        self.ragged = ragged
        self.room = room
        self.splits = splits
        self.pages = pages
        self.page_size = page_size

    def plan(self, spans: Sequence[Span], pages: Tensor, page_size: int) -> None:
        """As in `PromptAttention`, of the page table and size given at first."""
        self.ragged.upload(spans, self.room)

    def run_into(
        self, out: Tensor, query: Tensor, keys: Tensor, values: Tensor, scale: float, *, beside_decode: bool
    ) -> None:
        """As in `PromptAttention`."""
        paged_prefill(
            query,
            keys,
            values,
            self.ragged.tiles[: self.room],
            self.pages,
            self.page_size,
            scale,
            self.splits,
            pdl=True,
            beside=beside_decode,
            out=out,
        )


@dataclass(frozen=True, slots=True)
class MixedRows:
    """A step whose single tokens come first. A captured graph keeps reading these places."""

    singles: DecodeRows
    prompts: PromptAttention
    """Planned for the rest."""
    out: Tensor
    """[T, heads, head_dim], where results go. Padding gets what lay there: only its own keys come of it, on the padding
    page, and only padding reads those."""


class MixedAttention:
    """An `AttentionBackend` for steps laid out by a `Shape`; their plan is a `MixedRows`."""

    def __init__(self) -> None:
        self.decode = TritonDecode()

    def plan(self, spans: Sequence[Span], pages: Tensor, page_size: int) -> MixedRows:
        """There is no whole to plan: the runtime plans the prompts."""
        raise TypeError("mixed steps are not planned as one; give the batch a MixedRows")

    def run(self, plan: MixedRows, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """As in `AttentionBackend`."""
        count = len(plan.singles.rows)
        # Held until both kernels are enqueued: they run side by side, and memory of the one must not be the other's.
        scratch = split_scratch(query[:count], plan.singles.splits)
        if count:
            self.decode.run(plan.singles, query[:count], keys, values, scale, plan.out[:count], scratch)
        plan.prompts.run_into(plan.out[count:], query[count:], keys, values, scale, beside_decode=count > 0)
        return plan.out
