"""The memory of all keys and values: one allocation, cut into layers. Who owns which page is decided elsewhere."""

import torch
from torch import Tensor


class KVStorage:
    """Keys and values of every layer by place: page * page_size + offset.

    Page 0 is reserved: padding reads and writes there, and no sequence ever owns it. The pool starts as zeros, because
    a masked place still takes part in a product, and nothing times NaN is NaN.
    """

    def __init__(self, page_size: int, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
        """keys, values: one tensor a layer, [pages * page_size, kv_heads, head_dim]."""
        self.page_size = page_size
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
        """Storage of `pages` pages, page 0 included, of page_size tokens each."""
        shape = (layers, 2, pages * page_size, kv_heads, head_dim)
        pool = torch.zeros(shape, dtype=dtype, device=device)
        return cls(page_size, pool[:, 0].unbind(0), pool[:, 1].unbind(0))

    @staticmethod
    def bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Memory that one token's keys and values take over all layers."""
        return 2 * layers * kv_heads * head_dim * dtype.itemsize

    @property
    def pages(self) -> int:
        return self.keys[0].shape[0] // self.page_size
