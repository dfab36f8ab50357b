"""Online softmax of the attention kernels, in base 2.

Paper: Milakov and Gimelshein, 2018.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.paged_pool import head_width

LOG2_E = 1.4426950408889634
WARPGROUP_ROWS = 64
"""Tile rows from which matmuls use Hopper's and Blackwell's warpgroup instructions."""


def max_stages(rows: int, positions: int, query: Tensor, keys: Tensor, gpu: GpuTraits) -> int:
    """Return the maximum number of pipeline stages that fit in shared memory.

    A stage loads the keys and values of a block; the tile's queries and probabilities stay resident. Warpgroup
    instructions read keys and values of a narrower dtype after a conversion, which takes a buffer too.

    rows: of the tile, query heads times queries; positions: per block; query: [.., heads, D]; keys: [.., kv_heads, D].
    """
    head_dim, itemsize = head_width(query.shape[-1]), query.element_size()
    warpgroup = rows >= WARPGROUP_ROWS
    held = rows * (head_dim + positions) * itemsize
    if warpgroup and keys.element_size() < itemsize:
        held += 2 * positions * head_dim * itemsize
    return gpu.max_stages(2 * positions * head_dim * keys.element_size(), held, warpgroup=warpgroup)


def kernel_scale(scale: float, softcap: float | None) -> float:
    """Return the scale of QK scores that `attend` takes.

    Without a soft cap it yields base-2 exponents; with one, the exponents from which `attend` computes tanh.
    """
    return scale * LOG2_E if softcap is None else 2 * LOG2_E * scale / softcap


def kernel_cap(softcap: float | None) -> float | None:
    """Return the soft cap in base-2 exponents, or None without one."""
    return None if softcap is None else softcap * LOG2_E


@triton.jit
def cast_query(q, keys_ptr):
    """Cast a tile of queries to the dtype of the matmuls.

    This is their own dtype, but float16 for bfloat16 queries over an FP8 pool: GPUs convert FP8 to float16 in one
    instruction, and need another for bfloat16. The key scale keeps such queries well within float16's range: their dot
    products with stored keys are the scores.
    """
    dtype: tl.constexpr = keys_ptr.dtype.element_ty
    return q.to(tl.float16) if dtype.is_fp8() and q.dtype == tl.bfloat16 else q


@triton.jit
def apply_softcap(scores, CAP: tl.constexpr):
    """Apply a soft cap, if any, to base-2 exponents.

    tanh(x) = 1 - 2 / (exp(2 x) + 1), which is 1 in float32 long before the exponential overflows.
    """
    if CAP is not None:
        scores = CAP - 2 * CAP / (tl.exp2(tl.minimum(scores, 64.0)) + 1)
    return scores


@triton.jit
def attend(q, k, v, visible, scale, best, weight, acc, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Update the running softmax of a query tile with one block of keys and values.

    Keys and values of a narrower dtype are cast to the query's, which is exact. visible: bool, broadcast to [queries,
    keys]; scale: from `kernel_scale`; CAP: from `kernel_cap`. best, weight: [queries], the largest exponent so far and
    the sum of exponentials relative to it; acc: [queries, D]. Returns these three, updated.
    """
    k, v = k.to(q.dtype), v.to(q.dtype)
    scores = apply_softcap(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, CAP)
    scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    shrink = tl.exp2(best - new_best)
    p = tl.exp2(scores - new_best[:, None])
    weight = weight * shrink + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return new_best, weight, acc
