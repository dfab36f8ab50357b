"""Page table, mapping rows and positions to slots of the KV pool."""

from collections.abc import Sequence
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
    """[rows, columns] int32 on the device. Row r lists its pages in order of position, see `ring`."""
    page_size: int
    """Positions in a page, a power of two."""
    page_stride: int
    """Slots between the starts of consecutive pages."""
    window: int | None = None
    """Window of all layers that use the table: pages before it may hold anything. None: a row keeps all of its pages.
    """
    ring: int = 0
    """Number of pages after which the columns repeat, 0 if they do not: the page with index p is in columns p % ring
    and ring + p % ring, so that any `ring` consecutive pages are in consecutive columns."""

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the slots of the given positions.

        rows, positions: int64, of equal shape, which is also the result's.
        """
        column = positions // self.page_size
        page = self.pages[rows, column % self.ring if self.ring else column].long()
        return page * self.page_stride + positions % self.page_size

    def slots_between(self, rows: Sequence[int], first: int, end: int) -> Tensor:
        """Return the slots of positions `first` to `end - 1` of rows, [rows, end - first] int64.

        Slots of positions that a row does not keep are those of any page.
        """
        lowest, last = first // self.page_size, ceil_div(end, self.page_size)
        offsets = torch.arange(self.page_size, device=self.pages.device)
        pages = self.pages[list(rows)]
        if self.ring:
            pages = pages[:, torch.arange(lowest, last, device=self.pages.device) % self.ring]
        else:
            pages = pages[:, lowest:last]
        slots = (pages.long().unsqueeze(-1) * self.page_stride + offsets).flatten(1)
        return slots[:, first - lowest * self.page_size : end - lowest * self.page_size]

    def first_page(self, start: int) -> int:
        """Return the index of the first page that a query at position `start` reads, and those after it."""
        return 0 if self.window is None else max(0, start + 1 - self.window) // self.page_size

    def column(self, page: int) -> int:
        """Return the first column of a page, by its index."""
        return page % self.ring if self.ring else page

    @property
    def flat(self) -> Tensor:
        """All columns up to the table's last, one row after the other; row r begins at index r * pages.stride(0)."""
        rows, columns = self.pages.shape
        return self.pages.as_strided(((rows - 1) * self.pages.stride(0) + columns,), (1,))

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time constants for kernels that address the pool."""
        return {"PAGE_SIZE": self.page_size, "PAGE_STRIDE": self.page_stride, "RING": self.ring}

    def check(self) -> None:
        """Raise ValueError for a table that the kernels cannot address.

        The page size must be a power of two, and each row of the table contiguous.
        """
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(
                f"pages of {self.page_size} positions are not supported; the page size must be a power of two"
            )
        if self.ring and self.window is None:
            raise ValueError("only a table of layers with a window may have columns that repeat")
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


def layout_constants(page_tables: Sequence[PageTable]) -> dict[str, object]:
    """Return the compile-time constants of kernels that read the page tables of all KV groups.

    COLUMNS: first column of each group in the rows of the common table, and its `PageTable.ring`.
    """
    first = page_tables[0].pages.storage_offset()
    return {
        "COLUMNS": tuple((table.pages.storage_offset() - first, table.ring) for table in page_tables),
        "PAGE_SIZE": page_tables[0].page_size,
        "PAGE_STRIDE": page_tables[0].page_stride,
    }
