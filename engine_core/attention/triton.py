"""Decode attention that needs no planning: lengths and pages are read from device memory by the kernel itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine_core.attention.base import Span
from engine_core.kernels.paged_decode import paged_decode


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
