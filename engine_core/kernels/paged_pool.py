"""Addressing of the paged KV pool, and checks of its layout."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels import kv_dtype

HEAD_DIMS = (32, 64, 96, 128, 256)
"""Values of head_dim that the kernels are compiled for."""
LARGEST = tl.constexpr(kv_dtype.LARGEST)


@triton.jit
def stored(x, pool_ptr, scale, SCALED: tl.constexpr):
    """Convert x to the pool's dtype, as `kv_dtype.to_pool` does."""
    dtype: tl.constexpr = pool_ptr.dtype.element_ty
    if dtype.is_fp8():
        x = x.to(tl.float32)
        if SCALED:
            x = x / scale
        x = tl.clamp(x, -LARGEST, LARGEST)
    return x.to(dtype)


@triton.jit
def slots_of(page, position, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr):
    """Return the int64 slots of positions in the given pages.

    slot * elements per slot can exceed 32 bits.
    """
    return page.to(tl.int64) * PAGE_STRIDE + position % PAGE_SIZE


@triton.jit
def ring_row(page_row, lowest, PAGE_SIZE: tl.constexpr, RING: tl.constexpr):
    """Return the pointer to a row of the page table to which page indexes are added.

    lowest: the lowest position of the row that will be looked up. RING: as in `PageTable`.
    """
    if RING:
        first = lowest // PAGE_SIZE
        page_row += first % RING - first
    return page_row


@triton.jit
def page_index(position, lowest, last, PAGE_SIZE: tl.constexpr, RING: tl.constexpr):
    """Return the index of the page of each position, at most that of `last`.

    In a table whose columns repeat it is also at least that of `lowest`.
    """
    position = tl.minimum(position, last)
    if RING:
        position = tl.maximum(position, lowest)
    return position // PAGE_SIZE


@triton.jit
def in_head(mask, d, D: tl.constexpr, WIDE: tl.constexpr):
    """Return a mask over rows and head elements, [rows, 1] or [rows, WIDE].

    A tile is padded to a power of two: elements `d` from D on belong to the next head.
    """
    if WIDE == D:
        return mask[:, None]
    else:
        return mask[:, None] & (d < D)[None, :]


def head_width(head_dim: int) -> int:
    """Return head_dim padded to a power of two, the width of a tile."""
    return int(triton.next_power_of_2(head_dim))


def check_head_dim(head_dim: int) -> None:
    """Raise ValueError for a head_dim that the kernels are not compiled for."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {head_dim} is not supported; it must be one of {HEAD_DIMS}")


def check_groups(heads: int, kv_heads: int) -> None:
    """Raise ValueError unless the KV heads divide the query heads."""
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly; use a multiple of {kv_heads}")


def check_heads(projected: Tensor, keys: Tensor, values: Tensor) -> None:
    """Raise ValueError for a memory layout that the kernels cannot address.

    Heads must be contiguous, and keys and values must have equal slot strides.

    projected: [T, heads, D], queries or all heads of the QKV projection; keys, values: [slots, kv_heads, D].
    """
    head_dim = projected.shape[2]
    inner = {(t.shape[2], *t.stride()[1:]) for t in (projected, keys, values)}
    if inner != {(head_dim, head_dim, 1)} or keys.stride(0) != values.stride(0):
        raise ValueError(
            "heads of queries, keys and values must be contiguous, with equal slot strides of keys and values"
        )


def check_band(window: int | None, softcap: float | None) -> None:
    """Raise ValueError for a window below 1 or a non-positive soft cap."""
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} positions is not supported; it must be at least 1")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"a soft cap of {softcap} is not supported; it must be positive")
