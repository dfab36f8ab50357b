"""Ragged attention over the paged pool through FlashInfer (Ye et al., 2025).

It serves prefill, chunks and mixed steps. Each slot (and, for graphs, each number of tokens) has its own planner,
because planning writes into pinned memory that the device still reads (I6). Every host tensor passed to the library is
a pinned buffer of the planner: copies from pageable memory would synchronize (I7).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from tandem.engine_core.attention.base import LayerAttention, Span, kinds_of_attention
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.page_table import PageTable

WORKSPACE_BYTES = 256 * 2**20
"""Size of the floating-point workspace shared by all wrappers of a slot, in bytes."""
GRAPH_PLAN_BYTES = 2 * 2**20
"""Size of the plan of one graph and kind of layer, in bytes: some hundred for each query tile and head."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Shape and dtype of the attention heads of a model's layers."""

    query: int
    """Number of query heads."""
    kv: int
    """Number of key and value heads."""
    head_dim: int
    """Elements of a head."""
    dtype: torch.dtype
    """Dtype of queries."""
    kv_dtype: torch.dtype | None = None
    """Dtype of keys and values, float8_e4m3fn or None for that of queries."""


Wrappers = dict[LayerAttention, BatchPrefillWithPagedKVCacheWrapper]
"""One wrapper per kind of layer, since each is planned for one scale, window and soft cap.

Layers of several KV groups share it: their plans are equal, as the tables of equal windows have equal columns. Only the
page ids differ, which are set before each run.
"""


def wrappers_of(
    kinds: Sequence[LayerAttention], new: Callable[[LayerAttention], BatchPrefillWithPagedKVCacheWrapper]
) -> Wrappers:
    """Return the wrapper of each kind, one for all groups of a kind.

    new: makes a wrapper.
    """
    made = {replace(kind, group=0): new(kind) for kind in kinds_of_attention(kinds)}
    return {kind: made[replace(kind, group=0)] for kind in kinds}


class RowLengths(Tensor):
    """Host tensor [B] that iterates over its largest element only.

    FlashInfer's `plan` calls Python's `max` on the lengths, which compares elements one by one as tensors: 0.3 ms for
    the 64 rows of a graph, longer than the rest of planning. With torch functions disabled for this class, anything
    computed from it is an ordinary tensor; `cpu` and `flatten`, which are no-ops, return it unchanged.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.amax(),))


@dataclass(frozen=True, slots=True)
class FlashInferStep:
    """An `AttentionStep` and a `PromptStep` whose plan is in the wrappers."""

    wrappers: Wrappers
    tokens: int
    """Number of planned queries. A graph may pass more; their results are unchanged."""
    page_table: PageTable
    """Page table of any KV group; its layout is that of all."""
    page_ids: Sequence[Tensor]
    """For each KV group, int32 on the device: what the plans' offsets of pages refer to."""

    def run(
        self, query: Tensor, keys: Tensor, values: Tensor, layer: LayerAttention, scales: Tensor | None = None
    ) -> Tensor:
        """Implement `AttentionStep.run`."""
        out = torch.empty_like(query)
        self.run_into(out, query, keys, values, layer, scales, overlaps_decode=False)
        return out

    def run_into(
        self,
        out: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: LayerAttention,
        scales: Tensor | None = None,
        *,
        overlaps_decode: bool,
    ) -> None:
        """Implement `PromptStep.run_into`."""
        pool = self.page_table.view_pages(keys), self.page_table.view_pages(values)
        wrapper = self.wrappers[layer]
        wrapper._paged_kv_indices_buf = self.page_ids[layer.group]
        wrapper.run(query[: self.tokens], pool, out=out[: self.tokens])
        if scales is not None:
            # The library's kernel for 16-bit queries takes no scale, and its `run` would launch the same
            # multiplication. A graph's padding is multiplied again in each layer; only padding reads it.
            out[: self.tokens].mul_(scales[1])


class RowPages(NamedTuple):
    """Pages that B rows of a step read, in tables of one window."""

    pages_before: Tensor
    """[B + 1] int32 on the host, number of pages before those of each row."""
    last: Tensor
    """[B] int32 on the host, number of positions in the last page."""
    lengths: Tensor
    """[B] int32 on the host, number of positions from the beginning of the first page on."""
    entries: Tensor
    """int32 on the device, index of each page in the flat table."""


class FlashInferPlanner:
    """An `AttentionPlanner` for rows of any lengths, including decode rows."""

    def __init__(
        self,
        wrappers: Wrappers,
        workspace: Tensor,
        heads: HeadShape,
        host: Tensor,
        device_index: Tensor,
        stride: int,
        batch: int | None = None,
        page_ids: Sequence[Tensor] = (),
        for_hopper: bool = False,
    ) -> None:
        """Store the wrappers and the memory that plans are written to.

        workspace: of the wrappers; host: pinned int32; device_index: int32 on the device, at least as long as one
        step's page tables; stride: words of host memory from one array of rows to the next. For wrappers that a graph
        captures: batch: rows that every plan is padded to; page_ids: for each KV group, int32 on the device, where the
        kernels read the pages of the planned rows. for_hopper: True if graphs can be planned as in `flashinfer_hopper`.
        """
        self.wrappers = wrappers
        self.workspace = workspace
        self.heads = heads
        self.host = host
        self.view = host.numpy()
        self.device_index = device_index
        self.stride = stride
        self.batch = batch
        self.page_ids = page_ids
        self.for_hopper = for_hopper
        self._kinds = kinds_of_attention(wrappers)
        self._planned: list[Tensor] = []

    @classmethod
    def allocate(
        cls,
        kinds: Sequence[LayerAttention],
        pinned: Callable[[int], Tensor],
        device: torch.device,
        heads: HeadShape,
        max_rows: int,
        max_pages: int,
        for_hopper: bool = False,
    ) -> "FlashInferPlanner":
        """Allocate workspace and staging memory.

        kinds: the distinct ones among the model's layers; pinned: allocates int32 host memory of a given length, from
        which copies do not synchronize; max_pages: maximum total page count of the rows of one step, shared pages
        counted each time.
        """
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        num_layouts = len({kind.window for kind in kinds}) if any(kind.group for kind in kinds) else 1
        return cls(
            wrappers_of(kinds, lambda _: BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="NHD")),
            workspace,
            heads,
            pinned((1 + 3 * num_layouts) * (max_rows + 1) + max_pages),
            torch.zeros(max_pages, dtype=torch.int32, device=device),
            max_rows + 1,
            for_hopper=for_hopper,
        )

    def for_graph(self, batch: int, max_pages: Sequence[int]) -> "FlashInferPlanner":
        """Return another planner for the same slot, with steps that can be captured.

        batch: maximum rows of a step; max_pages: maximum entries of their page tables, by KV group. The kernels read
        the plan from memory that the next call of `plan` overwrites.
        """
        # The arrays of a plan are consecutive in host memory.
        assert batch < self.stride, f"a graph of {batch} rows does not fit a planner of {self.stride - 1}"
        page_ids = [torch.zeros(count, dtype=torch.int32, device=self.device_index.device) for count in max_pages]
        wrappers = wrappers_of(
            list(self.wrappers), lambda kind: graph_wrapper(self.workspace, batch, page_ids[kind.group])
        )
        given = wrappers, self.workspace, self.heads, self.host, self.device_index, self.stride
        return FlashInferPlanner(*given, batch, page_ids)

    def plan(self, spans: Sequence[Span], page_tables: Sequence[PageTable]) -> FlashInferStep:
        """Implement `AttentionPlanner.plan`.

        The plan is in the wrappers, so the next one replaces it. Captured wrappers lack the pages until `gather_pages`
        is called.
        """
        count = self.batch or len(spans)
        lengths = np.array([span.length for span in spans] + [0] * (count - len(spans)), dtype=np.int32)
        queries, longest = self._part(0, count + 1), int(lengths.max())
        queries[0] = 0
        np.cumsum(lengths, out=queries[1:])
        laid_out: dict[tuple[int | None, int], RowPages] = {}
        used = 0
        for table in page_tables:
            key = table.window, table.ring
            if key not in laid_out:
                laid_out[key] = self._lay_out(len(laid_out), used, spans, count, table)
                used += len(laid_out[key].entries)
        rows = [laid_out[table.window, table.ring] for table in page_tables]
        self._planned = [own.entries for own in rows]
        page_ids = self.page_ids
        if not page_ids:
            page_ids = [table.flat.index_select(0, own.entries) for table, own in zip(page_tables, rows, strict=True)]
        for kind in self._kinds:
            own, wrapper = rows[kind.group], self.wrappers[kind]
            ids = page_ids[kind.group][:0] if self.page_ids else page_ids[kind.group]
            if self.page_ids:
                assert len(own.entries) <= len(self.page_ids[kind.group]), (
                    f"{len(own.entries)} pages of the planned rows in memory of {len(self.page_ids[kind.group])}"
                )
            arrays = self._host(0, count + 1), own.pages_before, ids, own.last
            plan_wrapper(wrapper, arrays, own.lengths, longest, self.heads, kind, page_tables[0].page_size)
        return FlashInferStep(self.wrappers, int(queries[-1]), page_tables[0], page_ids)

    def gather_pages(self, page_tables: Sequence[PageTable]) -> None:
        """Gather the pages of the planned rows for captured wrappers, from the page table of each KV group."""
        assert self.page_ids, "only planners of graphs gather pages after planning"
        for table, entries, ids in zip(page_tables, self._planned, self.page_ids, strict=True):
            torch.index_select(table.flat, 0, entries, out=ids[: len(entries)])

    def _lay_out(self, number: int, used: int, spans: Sequence[Span], count: int, table: PageTable) -> "RowPages":
        """Write the pages that each row reads to host memory, and their entries of the table to the device.

        With a window they begin at the first that a row's first query sees: earlier pages may hold anything.

        number: of layouts before this one; used: of entries of page tables before; count: of rows, including padding.
        """
        page_size, real = table.page_size, len(spans)
        first = np.array([table.first_page(span.start) for span in spans], dtype=np.int32)
        lengths = np.zeros(count, dtype=np.int32)
        lengths[:real] = [span.start + span.length for span in spans]
        lengths[:real] -= first * page_size
        pages = -(-lengths // page_size)
        before, last, totals = (self._part(1 + 3 * number + index, count + 1) for index in range(3))
        before[0] = 0
        np.cumsum(pages, out=before[1:])
        last[:count] = (lengths - 1) % page_size + 1
        totals[:count] = lengths
        columns = np.array([table.column(page) for page in first.tolist()], dtype=np.int32)
        begin = np.array([span.row for span in spans], dtype=np.int32) * table.pages.stride(0) + columns
        total, offset = int(before[count]), len(self.host) - len(self.device_index) + used
        entries = self.view[offset : offset + total]
        entries[:] = np.arange(total, dtype=np.int32) + np.repeat(begin - before[:real], pages[:real])
        index = self.device_index[used : used + total]
        index.copy_(self.host[offset : offset + total], non_blocking=True)
        row_array = 1 + 3 * number
        last_lengths = self._host(row_array + 1, count), self._host(row_array + 2, count)
        return RowPages(self._host(row_array, count + 1), *last_lengths, index)

    def _part(self, index: int, length: int) -> np.ndarray:
        return self.view[index * self.stride : index * self.stride + length]

    def _host(self, index: int, length: int) -> Tensor:
        return self.host[index * self.stride : index * self.stride + length]


def graph_wrapper(workspace: Tensor, batch: int, page_ids: Tensor) -> BatchPrefillWithPagedKVCacheWrapper:
    """Return a wrapper that can be captured, with its own memory for plans.

    batch: rows of every plan; page_ids: int32 on the device, where its kernels read the pages of rows.
    """

    def zeros(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=workspace.device)

    buffers = zeros(batch + 1), zeros(batch + 1), page_ids, zeros(batch)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", True, *buffers)
    wrapper.reset_workspace_buffer(workspace, torch.empty(GRAPH_PLAN_BYTES, dtype=torch.uint8, device=workspace.device))
    return wrapper


def plan_wrapper(
    wrapper: BatchPrefillWithPagedKVCacheWrapper,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    lengths: Tensor,
    longest: int,
    heads: HeadShape,
    kind: LayerAttention,
    page_size: int,
) -> None:
    """Plan a step for one kind of layer.

    rows: the library's `qo_indptr`, `paged_kv_indptr`, `paged_kv_indices` and `paged_kv_last_page_len`; lengths: [B]
    int32 on the host, context length of each row; longest: maximum queries of a row.
    """
    wrapper.plan(
        *rows,
        heads.query,
        heads.kv,
        heads.head_dim,
        page_size,
        causal=True,
        sm_scale=kind.scale,
        window_left=window_left(kind),
        logits_soft_cap=kind.softcap,
        q_data_type=heads.dtype,
        kv_data_type=heads.kv_dtype,
        seq_lens=lengths.as_subclass(RowLengths),
        max_token_per_sequence=longest,
    )


def window_left(kind: LayerAttention) -> int:
    """Return the number of earlier positions visible to a query; -1: all of them."""
    return -1 if kind.window is None else kind.window - 1


def load_kernel(kind: LayerAttention, pinned: Callable[[int], Tensor], device: torch.device, heads: HeadShape) -> str:
    """Load the kernel for a kind of layer.

    Return the library's name of its backend: "fa3", on Hopper for keys and values in the dtype of queries, or "fa2".
    The library compiles kernels that are not prebuilt. pinned: as in `FlashInferPlanner.allocate`. Raises RuntimeError
    or OSError if compilation fails, for example without a CUDA compiler.
    """
    kind = replace(kind, group=0)
    planner = FlashInferPlanner.allocate([kind], pinned, device, heads, 1, 1)
    page = torch.zeros(1, 1, dtype=torch.int32, device=device)
    planner.plan([Span(0, 0, 0, 1)], [PageTable(page, page_size=1, page_stride=1)])
    return str(planner.wrappers[kind]._backend)


class FlashInferGraphPlanner:
    """A `GraphPromptPlanner` for graphs of one number of tokens.

    It plans any of the library's kernels by its own `plan`. `flashinfer_hopper` takes less host time, where supported.
    """

    def __init__(self, planner: FlashInferPlanner, step: FlashInferStep, page_tables: Sequence[PageTable]) -> None:
        """Store a planner and the step that its graphs capture.

        planner: from `FlashInferPlanner.for_graph`; step: planned by it for the graphs' number of tokens.
        """
        self.planner = planner
        self.step = step
        self.page_tables = page_tables

    @classmethod
    def build(
        cls,
        eager: FlashInferPlanner,
        batch: int,
        tokens: int,
        max_pages: Sequence[int],
        page_tables: Sequence[PageTable],
    ) -> "FlashInferGraphPlanner":
        """Plan a full step of one row on the padding page, so that it can be captured.

        eager: of the slot, for uncaptured steps; batch, max_pages: as in `FlashInferPlanner.for_graph`.
        """
        planner = eager.for_graph(batch, max_pages)
        used = ceil_div(tokens, page_tables[0].page_size)
        padding = torch.zeros(1, used, dtype=torch.int32, device=page_tables[0].pages.device)
        full = [replace(table, pages=padding) for table in page_tables]
        return cls(planner, planner.plan([Span(0, 0, 0, tokens)], full), page_tables)

    def plan(self, spans: Sequence[Span]) -> None:
        """Implement `GraphPromptPlanner.plan`."""
        self.planner.plan(spans, self.page_tables)

    def gather_pages(self) -> None:
        """Implement `GraphPromptPlanner.gather_pages`."""
        self.planner.gather_pages(self.page_tables)
