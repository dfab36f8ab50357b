"""Ragged attention over the paged pool through FlashInfer (Ye et al., 2025): prefill, chunks and mixed steps.

One instance a slot (and, for graphs, a number of tokens), because planning writes into pinned memory that the device
still reads (I6). Every host tensor given to the library is a pinned buffer of this instance: from pageable memory its
copies would synchronise (I7).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from tandem.engine_core.attention.base import Span
from tandem.engine_core.integers import ceil_div

WORKSPACE_BYTES = 256 * 2**20
GRAPH_PLAN_BYTES = 2 * 2**20
"""Room for the plan of one graph: some hundred bytes a tile of queries and head."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of the attention of a model's layers."""

    query: int
    kv: int
    head_dim: int
    scale: float
    dtype: torch.dtype


class FlashInferAttention:
    """An `AttentionBackend` for rows of any lengths, decode rows among them."""

    def __init__(
        self,
        wrapper: BatchPrefillWithPagedKVCacheWrapper,
        workspace: Tensor,
        heads: Heads,
        page_size: int,
        host: Tensor,
        device_index: Tensor,
        batch: int | None = None,
    ) -> None:
        """workspace: of the wrapper; host: pinned int32; device_index: int32 on the device, as long as one step's page
        tables may be; batch: rows that every plan is padded to, for a wrapper that a graph holds."""
        self.wrapper = wrapper
        self.workspace = workspace
        self.batch = batch
        self.heads = heads
        self.page_size = page_size
        self.host = host
        self.view = host.numpy()
        self.tokens = 0
        """Queries of the present plan; a graph gives more, and what is beyond them stays as it is."""
        self.device_index = device_index

    @classmethod
    def allocate(
        cls,
        pinned: Callable[[int], Tensor],
        device: torch.device,
        heads: Heads,
        max_rows: int,
        pages: int,
        page_size: int,
    ) -> "FlashInferAttention":
        """pinned: makes int32 host memory of a length that copies without synchronising; pages: most that the rows of
        one step can name, shared ones counted each time."""
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return cls(
            BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="NHD"),
            workspace,
            heads,
            page_size,
            pinned(4 * (max_rows + 1) + pages),
            torch.zeros(pages, dtype=torch.int32, device=device),
        )

    def for_graph(self, batch: int, tokens: int, pages: int) -> "FlashInferAttention":
        """Another instance for the same slot, whose `run` can be captured: for up to so many rows and tokens, and
        entries of the rows' page tables.

        Planned for a full step already. Kernels read the plan where the next call of `plan` will write it.
        """
        device = self.device_index.device

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            self.workspace, "NHD", True, ints(batch + 1), ints(batch + 1), ints(pages), ints(batch)
        )
        wrapper.reset_workspace_buffer(self.workspace, torch.empty(GRAPH_PLAN_BYTES, dtype=torch.uint8, device=device))
        common = (self.workspace, self.heads, self.page_size, self.host, self.device_index)
        graphed = FlashInferAttention(wrapper, *common, batch)
        used = ceil_div(tokens, self.page_size)
        graphed.plan([Span(0, 0, 0, tokens)], torch.zeros(1, used, dtype=torch.int32, device=device), self.page_size)
        return graphed

    def plan(self, spans: Sequence[Span], pages: Tensor, page_size: int) -> None:
        """As in `AttentionBackend`. The plan lives in the wrapper."""
        count = self.batch or len(spans)
        padding = count - len(spans)
        lengths = np.array([span.length for span in spans] + [0] * padding, dtype=np.int32)
        ends = np.array([span.start + span.length for span in spans] + [0] * padding, dtype=np.int32)
        used = -(-ends // page_size)
        queries, tables, last, totals = (self._part(index, count + 1) for index in range(4))
        queries[0] = tables[0] = 0
        np.cumsum(lengths, out=queries[1:])
        np.cumsum(used, out=tables[1:])
        self.tokens = int(queries[-1])
        last[:count] = (ends - 1) % page_size + 1
        totals[:count] = ends
        self.wrapper.plan(
            self._host(0, count + 1),
            self._host(1, count + 1),
            self._page_ids(spans, used, pages),
            self._host(2, count),
            self.heads.query,
            self.heads.kv,
            self.heads.head_dim,
            page_size,
            causal=True,
            sm_scale=self.heads.scale,
            q_data_type=self.heads.dtype,
            kv_data_type=self.heads.dtype,
            seq_lens=self._host(3, count),
            max_token_per_sequence=int(lengths.max()),
        )

    def run(self, plan: None, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """As in `AttentionBackend`."""
        out = torch.empty_like(query)
        self.run_into(out, query, keys, values, scale, beside_decode=False)
        return out

    def run_into(
        self, out: Tensor, query: Tensor, keys: Tensor, values: Tensor, scale: float, *, beside_decode: bool
    ) -> None:
        """As in `PromptAttention`."""
        shape = (-1, self.page_size, *keys.shape[1:])
        self.wrapper.run(query[: self.tokens], (keys.view(shape), values.view(shape)), out=out[: self.tokens])

    def _page_ids(self, spans: Sequence[Span], used: np.ndarray, pages: Tensor) -> Tensor:
        """The used pages of the spans' rows, one row after the other, out of the page table on the device."""
        used = used[: len(spans)]
        total, width = int(used.sum()), pages.shape[1]
        offset = 4 * self._stride
        places = self.view[offset : offset + total]
        first = np.cumsum(used) - used
        begin = np.array([span.row for span in spans], dtype=np.int32) * width
        places[:] = np.arange(total, dtype=np.int32) + np.repeat(begin - first, used)
        index = self.device_index[:total]
        index.copy_(self.host[offset : offset + total], non_blocking=True)
        return pages.reshape(-1).index_select(0, index)

    @property
    def _stride(self) -> int:
        return (len(self.host) - len(self.device_index)) // 4

    def _part(self, index: int, length: int) -> np.ndarray:
        return self.view[index * self._stride : index * self._stride + length]

    def _host(self, index: int, length: int) -> Tensor:
        return self.host[index * self._stride : index * self._stride + length]
