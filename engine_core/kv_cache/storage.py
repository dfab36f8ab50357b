"""The memory of all keys and values.

It is one allocation, page after page, with a view for each layer.
"""

import torch
from torch import Tensor

from tandem.engine_core.kernels.page_table import PageTable


class KVStorage:
    """Keys and values of every layer, page-major.

    All that a page holds is one run of bytes, and all pages have the same size.

    A layer is addressed by slots of head vectors from its own first slot on, `page_stride` slots a page, so that a slot
    is the same number in every layer. Between two pages of a layer are those of the others: a layer's view must only be
    indexed by slots of a page table, never written as a whole.

    Page 0 is reserved: padding reads and writes there, and no sequence ever owns it. The pool starts as zeros, because
    a masked slot still takes part in a product, and nothing times NaN is NaN. Which sequence owns which page is decided
    by the KV manager.
    """

    def __init__(self, pool: Tensor, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
        """Keep the pool and its views.

        pool: [pages, layers, 2, page_size, kv_heads, head_dim]; keys, values: one view of it for each layer,
        [slots, kv_heads, head_dim], contiguous, from the layer's first slot to its last.
        """
        self.pool = pool
        self.keys = keys
        self.values = values

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "KVStorage":
        """Allocate `pages` pages, page 0 included, of `page_size` positions each."""
        pool = torch.zeros((pages, layers, 2, page_size, kv_heads, head_dim), dtype=dtype, device=device)
        flat = pool.view(-1, kv_heads, head_dim)
        slots = (pages - 1) * 2 * layers * page_size + page_size
        views = [flat[first : first + slots] for first in range(0, 2 * layers * page_size, page_size)]
        return cls(pool, tuple(views[0::2]), tuple(views[1::2]))

    @staticmethod
    def bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the bytes that one token's keys and values take over all layers."""
        return 2 * layers * kv_heads * head_dim * dtype.itemsize

    @property
    def pages(self) -> int:
        """Number of pages, page 0 included."""
        return self.pool.shape[0]

    def page_table(self, pages: Tensor) -> PageTable:
        """Return a page table of this pool.

        pages: pages of each row, [rows, pages_per_row] int32.
        """
        _, layers, _, page_size, _, _ = self.pool.shape
        return PageTable(pages, page_size, 2 * layers * page_size)
