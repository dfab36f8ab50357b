"""The pages of every row and the slots of the KV pool that they lead to."""

from dataclasses import dataclass

from torch import Tensor

from tandem.engine_core.integers import ceil_div


@dataclass(frozen=True, slots=True)
class PageTable:
    """Page ids by row, with the distances by which a layer's keys and values are addressed.

    A page holds `page_size` consecutive slots of a layer and the next page begins `page_stride` slots later, so the
    slot of a position is page * page_stride + position % page_size, in 64 bits. It is the same for every layer.
    """

    pages: Tensor
    """[rows, pages_per_row] int32, on the device. Row r holds the pages of r in the order of its positions."""
    page_size: int
    """Positions in a page, a power of two."""
    page_stride: int
    """Slots from the beginning of a page to that of the next."""

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the slots of the given rows' positions.

        rows, positions: int64, of one shape, which the result has too.
        """
        page = self.pages[rows, positions // self.page_size].long()
        return page * self.page_stride + positions % self.page_size

    def view_pages(self, pool: Tensor) -> Tensor:
        """View a layer's keys or values by page, [pages, page_size, kv_heads, head_dim].

        pool: [slots, kv_heads, head_dim], contiguous, from the layer's first slot on.
        """
        slots, kv_heads, head_dim = pool.shape
        width = kv_heads * head_dim
        shape = (ceil_div(slots, self.page_stride), self.page_size, kv_heads, head_dim)
        return pool.as_strided(shape, (self.page_stride * width, width, head_dim, 1))
