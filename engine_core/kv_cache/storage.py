"""The memory of all keys and values: one allocation with a view for each layer. Which sequence owns which page is
decided by the KV manager."""

import torch
from torch import Tensor

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.page_table import PageTable


class KVStorage:
    """Keys and values of every layer, indexed by slot: page * page_stride + offset in the page.

    Page 0 is reserved: padding reads and writes there, and no sequence ever owns it. The pool starts as zeros, because
    a masked slot still takes part in a product, and nothing times NaN is NaN.
    """

    def __init__(self, page_size: int, page_stride: int, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
        """page_size: positions in a page; page_stride: slots from a page to the next; keys, values: one tensor a layer,
        [slots, kv_heads, head_dim]."""
        self.page_size = page_size
        self.page_stride = page_stride
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
        shape = (layers, 2, pages * page_size, kv_heads, head_dim)
        pool = torch.zeros(shape, dtype=dtype, device=device)
        return cls(page_size, page_size, pool[:, 0].unbind(0), pool[:, 1].unbind(0))

    @staticmethod
    def bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the bytes that one token's keys and values take over all layers."""
        return 2 * layers * kv_heads * head_dim * dtype.itemsize

    @property
    def pages(self) -> int:
        """Number of pages, page 0 included."""
        return ceil_div(self.keys[0].shape[0], self.page_stride)

    def page_table(self, pages: Tensor) -> PageTable:
        """Return the page table of this pool with the given pages, [rows, pages_per_row] int32."""
        return PageTable(pages, self.page_size, self.page_stride)
