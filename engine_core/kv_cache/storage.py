"""The memory of all keys and values.

It is one allocation, page after page, with a view for each layer.
"""

import math

import torch
from msgspec import Struct
from torch import Tensor

from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kv_cache.groups import KVGroup


class KVLayout(Struct, frozen=True, kw_only=True):
    """Layout of a page.

    A page holds the keys and values of a group's layers for consecutive positions.
    """

    group: KVGroup
    page_size: int
    """Positions in a page, a power of two."""
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """Name of the dtype, such as "float8_e4m3fn"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of a page, [layers, 2, page_size, kv_heads, head_dim]."""
        return len(self.group.layers), 2, self.page_size, self.kv_heads, self.head_dim

    @property
    def page_elements(self) -> int:
        """Number of elements from one page to the next."""
        return math.prod(self.page_shape)

    @property
    def has_scales(self) -> bool:
        """True if keys and values are divided by scales, as in `kernels.kv_dtype`."""
        return self.dtype.itemsize == 1

    @property
    def page_bytes(self) -> int:
        return self.page_elements * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.page_bytes // self.page_size


class KVStorage:
    """Keys and values of the layers of a group, page-major.

    All that a page holds is one run of bytes, and all pages have the same size.

    A layer is addressed by slots of head vectors from its own first slot on, `page_stride` slots a page, so that a slot
    is the same number in every layer. Pages of all layers are interleaved: a layer's view must only be indexed by slots
    of a page table, never written as a whole.

    Page 0 is reserved: padding reads and writes there, and no sequence ever owns it. The pool is zero-initialized,
    because attention multiplies masked slots by 0, and 0 times NaN is NaN. Which sequence owns which page is decided by
    the KV manager.
    """

    def __init__(self, layout: KVLayout, pool: Tensor, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
        """Keep the pool and its views.

        pool: [pages, *layout.page_shape]; keys, values: one view of it for each layer of the group,
        [slots, kv_heads, head_dim], contiguous, from the layer's first slot to its last.
        """
        self.layout = layout
        self.pool = pool
        self.keys = keys
        self.values = values

    @classmethod
    def allocate(cls, layout: KVLayout, pages: int, device: torch.device | str) -> "KVStorage":
        """Allocate `pages` pages, page 0 included."""
        pool = torch.zeros((pages, *layout.page_shape), dtype=layout.dtype, device=device)
        flat = pool.view(-1, layout.kv_heads, layout.head_dim)
        size, stride = layout.page_size, _page_stride(layout)
        slots = (pages - 1) * stride + size
        views = [flat[first : first + slots] for first in range(0, stride, size)]
        return cls(layout, pool, tuple(views[0::2]), tuple(views[1::2]))

    @property
    def pages(self) -> int:
        """Number of pages, page 0 included."""
        return self.pool.shape[0]

    def page_table(self, pages: Tensor) -> PageTable:
        """Return a page table of this pool.

        pages: pages of each row, [rows, pages_per_row] int32.
        """
        return PageTable(pages, self.layout.page_size, _page_stride(self.layout))


def _page_stride(layout: KVLayout) -> int:
    """Return the stride of a page in slots."""
    layers, both, page_size, _, _ = layout.page_shape
    return layers * both * page_size
