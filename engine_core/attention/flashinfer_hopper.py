"""Prompts in graphs through FlashInfer's kernels for Hopper.

These kernels, fa3 (Shah et al., 2024), read all their inputs from the plan, and a row's pages from one array at an
offset that is also in the plan. Here that array is a page table itself: no pages are copied, and a step may be
planned before its pages are known. The library's own `plan` would also check its arguments, look up the kernel and copy
four unused arrays: with the planning itself half a millisecond of host time for each step with prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine_core.attention.base import LayerAttention, Span, kinds_of_attention
from tandem.engine_core.attention.flashinfer import (
    FlashInferPlanner,
    FlashInferStep,
    HeadShape,
    graph_wrapper,
    plan_wrapper,
    window_left,
    wrappers_of,
)
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.page_table import PageTable


@dataclass(frozen=True, slots=True)
class RowArrays:
    """Input of the library's planning: B rows on the host, including padding."""

    queries: Tensor
    """[B + 1] int32, number of queries before each row."""
    first_pages: Tensor
    """[B + 1] int32, index of each row's first page in the flat page table; entries of padding and the last are not
    read."""
    lengths: Tensor
    """[B] int32, context length of each row from the beginning of that page on."""

    @classmethod
    def allocate(cls, rows: int) -> "RowArrays":
        return cls(*(torch.zeros(count, dtype=torch.int32) for count in (rows + 1, rows + 1, rows)))

    def write(self, spans: Sequence[Span], table: PageTable) -> None:
        """Write a step's rows.

        With a window they begin at the first page that a row's first query sees: earlier pages may hold anything.
        """
        count, width = len(spans), table.pages.stride(0)
        assert count <= len(self.lengths), f"{count} rows in a plan of {len(self.lengths)}"
        rows: NDArray[np.int32] = np.array([(s.row, s.start, s.length) for s in spans], np.int32).reshape(-1, 3)
        queries, first_pages, lengths = self.queries.numpy(), self.first_pages.numpy(), self.lengths.numpy()
        np.cumsum(rows[:, 2], out=queries[1 : count + 1])
        queries[count + 1 :] = queries[count]
        np.multiply(rows[:, 0], width, out=first_pages[:count])
        np.add(rows[:, 1], rows[:, 2], out=lengths[:count])
        lengths[count:] = 0
        if table.window is not None:
            first = [table.first_page(span.start) for span in spans]
            first_pages[:count] += np.array([table.column(page) for page in first], np.int32)
            lengths[:count] -= np.array(first, np.int32) * table.page_size


class HopperGraphPlanner:
    """A `GraphPromptPlanner` for graphs of one number of tokens."""

    def __init__(
        self, rows: Sequence[tuple[PageTable, RowArrays]], plans: list[Callable[[], object]], step: FlashInferStep
    ) -> None:
        """Store the memory that plans are made from, and a step to capture.

        rows: for each distinct window of KV groups, the page table of one and the arrays of its rows; plans: per kind
        of layer, writes a plan from the rows of its groups to the memory that the step's kernels read.
        """
        self.rows = rows
        self.plans = plans
        self.step = step

    @classmethod
    def build(
        cls, eager: FlashInferPlanner, batch: int, tokens: int, page_tables: Sequence[PageTable]
    ) -> "HopperGraphPlanner":
        """Plan a full step of one row, so that it can be captured.

        It uses the first entries of the page tables, whichever rows they belong to: all are still the padding page.
        eager: of the slot, for uncaptured steps; batch: maximum rows of a step.
        """
        page_size, page_ids = page_tables[0].page_size, [table.flat for table in page_tables]
        entries = min(len(ids) for ids in page_ids)
        assert ceil_div(tokens, page_size) <= entries, f"{tokens} tokens, {entries} entries"
        rows: dict[tuple[int | None, int], tuple[PageTable, RowArrays]] = {}
        for table in page_tables:
            if (table.window, table.ring) not in rows:
                own = RowArrays.allocate(batch)
                own.write([Span(0, 0, 0, tokens)], table)
                rows[table.window, table.ring] = table, own
        wrappers = wrappers_of(
            list(eager.wrappers), lambda kind: graph_wrapper(eager.workspace, batch, page_ids[kind.group])
        )
        plans = []
        for kind in kinds_of_attention(wrappers):
            wrapper, table = wrappers[kind], page_tables[kind.group]
            _, own = rows[table.window, table.ring]
            # Let the library plan first: it chooses the kernel and keeps the options of runs.
            given = own.queries, own.first_pages, page_ids[kind.group][:0], torch.ones_like(own.lengths)
            plan_wrapper(wrapper, given, own.lengths, tokens, eager.heads, kind, page_size)
            plans.append(_planning(wrapper, own, eager.heads, kind, page_size, tokens))
        return cls(list(rows.values()), plans, FlashInferStep(wrappers, tokens, page_tables[0], page_ids))

    def plan(self, spans: Sequence[Span]) -> None:
        """Implement `GraphPromptPlanner.plan`."""
        for table, own in self.rows:
            own.write(spans, table)
        for plan in self.plans:
            plan()

    def gather_pages(self) -> None:
        """Implement `GraphPromptPlanner.gather_pages`: the kernels read the page tables."""


def _planning(
    wrapper: BatchPrefillWithPagedKVCacheWrapper,
    rows: RowArrays,
    heads: HeadShape,
    kind: LayerAttention,
    page_size: int,
    tokens: int,
) -> Callable[[], object]:
    """Return a function that writes the plan of `rows` to an already planned wrapper.

    It is the library's internal function below `plan`, in the versions for which `startup.attention` chooses this
    planner. Its result, the offset of each array in the plan memory, is constant.
    """
    return partial(
        wrapper._cached_module.plan,
        wrapper._float_workspace_buffer,
        wrapper._int_workspace_buffer,
        wrapper._pin_memory_int_workspace_buffer,
        rows.queries,
        rows.first_pages,
        rows.lengths,
        tokens,
        len(rows.lengths),
        heads.query,
        heads.kv,
        page_size,
        True,  # for a graph
        heads.head_dim,
        heads.head_dim,
        True,  # causal
        window_left(kind),
    )
