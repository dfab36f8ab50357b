"""The memory of all keys and values.

It is one allocation, page after page, with a view for each layer.
"""

import math

import torch
from msgspec import Struct
from torch import Tensor

from tandem.engine_core.kernels.delta_rule.checkpoints import Checkpoints
from tandem.engine_core.kernels.delta_rule.state import DeltaRuleState
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kv_cache.groups import KVGroup


class KVLayout(Struct, frozen=True, kw_only=True):
    """Layout of a page.

    A page holds the keys and values of one group's layers for consecutive positions. It has room for the layers of the
    largest group.
    """

    groups: tuple[KVGroup, ...]
    page_size: int
    """Positions in a page, a power of two."""
    dtype: torch.dtype

    @classmethod
    def of_one_group(
        cls, layers: int, *, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> "KVLayout":
        """Return the layout of a pool in which all layers keep all positions."""
        return cls(groups=(KVGroup(tuple(range(layers)), kv_heads, head_dim),), page_size=page_size, dtype=dtype)

    @property
    def kv_heads(self) -> int:
        return self.groups[0].kv_heads

    @property
    def head_dim(self) -> int:
        return self.groups[0].head_dim

    @property
    def dtype_name(self) -> str:
        """Name of the dtype, such as "float8_e4m3fn"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of a page, [layers, 2, page_size, kv_heads, head_dim]."""
        layers = max(len(group.layers) for group in self.groups)
        return layers, 2, self.page_size, self.kv_heads, self.head_dim

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
        """Bytes of one token in the pages of all groups."""
        return len(self.groups) * self.page_bytes // self.page_size


class KVStorage:
    """Keys and values of all layers, page-major, and the state of recurrent layers.

    All that a page holds is one run of bytes, and all pages have the same size: any page serves any group.

    A layer is addressed by slots of head vectors from its own first slot on, `page_stride` slots a page, so that a slot
    is the same number in every layer. Pages of all layers are interleaved: a layer's view must only be indexed by slots
    of its group's page table, never written as a whole. Layers of different groups may have the same view.

    Page 0 is reserved: padding reads and writes there, and no sequence ever owns it. The pool is zero-initialized,
    because attention multiplies masked slots by 0, and 0 times NaN is NaN. Which sequence owns which page is decided by
    the KV manager.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: Tensor,
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
        recurrent: tuple[DeltaRuleState, ...] = (),
        checkpoints: Checkpoints | None = None,
        draft: "KVStorage | None" = None,
    ) -> None:
        """Keep the pool and its views.

        pool: [pages, *layout.page_shape]; keys, values: one view of it for each layer with attention, [slots, kv_heads,
        head_dim], contiguous, from the layer's first slot to its last; recurrent: the state of each recurrent layer;
        checkpoints: slots for copies of that state, None if there are none; draft: keys and values of the draft model,
        in a pool of as many pages, None if there is none.
        """
        self.layout = layout
        self.pool = pool
        self.keys = keys
        self.values = values
        self.recurrent = recurrent
        self.checkpoints = checkpoints
        self.draft = draft

    @classmethod
    def allocate(
        cls,
        layout: KVLayout,
        pages: int,
        device: torch.device | str,
        recurrent: tuple[DeltaRuleState, ...] = (),
        checkpoints: Checkpoints | None = None,
        draft: KVLayout | None = None,
    ) -> "KVStorage":
        """Allocate `pages` pages, page 0 included.

        recurrent, checkpoints: as in `__init__`; the rows are those of the page table; draft: layout of the draft
        model's pool.

        Raises ValueError for groups whose pages would differ in shape.
        """
        if len(shapes := {(group.kv_heads, group.head_dim) for group in layout.groups}) > 1:
            raise ValueError(
                f"KV groups of different (kv_heads, head_dim), {sorted(shapes)}, are not supported: all pages "
                "must have one shape"
            )
        pool = torch.zeros((pages, *layout.page_shape), dtype=layout.dtype, device=device)
        flat = pool.view(-1, layout.kv_heads, layout.head_dim)
        size, stride = layout.page_size, _page_stride(layout)
        slots = (pages - 1) * stride + size
        views = [flat[first : first + slots] for first in range(0, stride, size)]
        # A layer's index in the page is its index in its group.
        index = {layer: index for group in layout.groups for index, layer in enumerate(group.layers)}
        order = [index[layer] for layer in sorted(index)]
        keys, values = (tuple(views[2 * i + part] for i in order) for part in range(2))
        of_draft = None if draft is None else cls.allocate(draft, pages, device)
        return cls(layout, pool, keys, values, recurrent, checkpoints, of_draft)

    @property
    def pages(self) -> int:
        """Number of pages, page 0 included."""
        return self.pool.shape[0]

    def page_table(self, pages: Tensor, group: int = 0, ring: int = 0) -> PageTable:
        """Return a page table of a group of layers of this pool.

        pages, ring: as in `PageTable`.
        """
        layout = self.layout
        return PageTable(pages, layout.page_size, _page_stride(layout), layout.groups[group].window, ring)


def _page_stride(layout: KVLayout) -> int:
    """Return the stride of a page in slots."""
    layers, both, page_size, _, _ = layout.page_shape
    return layers * both * page_size
