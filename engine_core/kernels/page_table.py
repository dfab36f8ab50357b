"""Page table, mapping rows and positions to slots of the KV pool."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine_core.integers import ceil_div


@dataclass(frozen=True, slots=True)
class PageTable:
    """Page ids by row, and the layout that addresses a layer's keys and values.

    A page holds `page_size` consecutive slots of a layer and the next page begins `page_stride` slots later, so the
    slot of a position is page * page_stride + position % page_size, in 64 bits. That slot is the same for every layer.
    """

    pages: Tensor
    """[rows, pages_per_row] int32 on the device. Row r lists its pages in order of position."""
    page_size: int
    """Positions in a page, a power of two."""
    page_stride: int
    """Slots between the starts of consecutive pages."""

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the slots of the given positions.

        rows, positions: int64, of equal shape, which is also the result's.
        """
        page = self.pages[rows, positions // self.page_size].long()
        return page * self.page_stride + positions % self.page_size

    def first_slots(self, rows: slice, count: int) -> Tensor:
        """Return the slots of the first positions of consecutive rows.

        count: number of positions of each row. Returns [rows, count] int64.
        """
        offsets = torch.arange(self.page_size, device=self.pages.device)
        pages = self.pages[rows, : ceil_div(count, self.page_size)].long()
        return (pages.unsqueeze(-1) * self.page_stride + offsets).flatten(1)[:, :count]

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time constants for kernels that address the pool."""
        return {"PAGE_SIZE": self.page_size, "PAGE_STRIDE": self.page_stride}

    def check(self) -> None:
        """Raise ValueError for a table that the kernels cannot address.

        The page size must be a power of two, and each row of the table contiguous.
        """
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(
                f"pages of {self.page_size} positions are not supported; the page size must be a power of two"
            )
        if self.pages.stride(1) != 1:
            raise ValueError("each row of the page table must be contiguous")

    def view_pages(self, pool: Tensor) -> Tensor:
        """View a layer's keys or values by page, [pages, page_size, kv_heads, head_dim].

        pool: [slots, kv_heads, head_dim], contiguous, from the layer's first slot on.
        """
        slots, kv_heads, head_dim = pool.shape
        width = kv_heads * head_dim
        shape = (ceil_div(slots, self.page_stride), self.page_size, kv_heads, head_dim)
        return pool.as_strided(shape, (self.page_stride * width, width, head_dim, 1))
