"""Fused RoPE and KV write of decode attention.

Query heads are rotated as they are loaded, and the softmax starts with the newest key and value. So attention reads
only positions from the pool that earlier steps wrote; one program per KV head stores the newest. QK norms can be fused
too. Oracle: `reference.layer.qk_norm_rope_and_kv_write`, then attention.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import triton
import triton.language as tl

from tandem.engine_core.kernels.attention.online_softmax import apply_softcap, cast_query
from tandem.engine_core.kernels.paged_pool import stored


@triton.jit
def load_newest(
    cos_ptr,
    sin_ptr,
    slot_mapping_ptr,
    q_norm_ptr,
    k_norm_ptr,
    scales_ptr,
    b,
    cos_stride,
    sin_stride,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROTARY_PAIRS: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Load the inputs of `begin` that were written before the preceding kernel.

    An element is rotated with its partner, ROTARY_PAIRS elements away; those past the first 2 * ROTARY_PAIRS are
    unchanged. Returns the slot of the newest position; each element's partner index, cosine and signed sine, [WIDE];
    the weights of the query norm, for elements and partners, and of the key norm, likewise, [WIDE]; and the scales of
    keys and values.
    """
    d = tl.arange(0, WIDE)
    partner = tl.where(d < ROTARY_PAIRS, d + ROTARY_PAIRS, tl.where(d < 2 * ROTARY_PAIRS, d - ROTARY_PAIRS, d))
    # Runs of partners are contiguous up to the largest power of two that divides their distance.
    ALIGNED: tl.constexpr = ROTARY_PAIRS & -ROTARY_PAIRS
    partner = tl.max_contiguous(tl.multiple_of(partner, ALIGNED), ALIGNED)
    turns = d < 2 * ROTARY_PAIRS
    cos = tl.load(cos_ptr + b * cos_stride + d, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + b * sin_stride + d, mask=turns, other=0.0)
    q_weight, q_partner, k_weight, k_partner = cos, cos, cos, cos
    if NORM:
        inside = d < D
        q_weight = tl.load(q_norm_ptr + d, mask=inside, other=0.0)
        q_partner = tl.load(q_norm_ptr + partner, mask=inside, other=0.0)
        k_weight = tl.load(k_norm_ptr + d, mask=inside, other=0.0)
        k_partner = tl.load(k_norm_ptr + partner, mask=inside, other=0.0)
    key_scale, value_scale = 1.0, 1.0
    if SCALED:
        key_scale, value_scale = tl.load(scales_ptr), tl.load(scales_ptr + 1)
    slot = tl.load(slot_mapping_ptr + b)
    return slot, partner, cos, sin, q_weight, q_partner, k_weight, k_partner, key_scale, value_scale


@triton.jit
def _factored(x, weight, dtype: tl.constexpr):
    """Multiply normalized x by the norm's weight.

    It is rounded to the weight's dtype before and to the head's after, as in `norm.normalize`.
    """
    return (x.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _rotated(heads_ptr, mask, partner, cos, sin, weight, partner_weight, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Load heads, normalize them with NORM, and rotate them.

    heads_ptr: the first element of each head, [N, 1], or of one; mask: broadcast to [N, WIDE]. Returns [N, WIDE]
    float32, not rounded.
    """
    d = tl.arange(0, partner.shape[0])
    raw = tl.load(heads_ptr + d[None, :], mask=mask, other=0.0)
    first = raw.to(tl.float32)
    second = tl.load(heads_ptr + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(first * first, axis=1) / D + eps)[:, None]
        first = _factored(first * inverse, weight, raw.dtype)
        second = _factored(second * inverse, partner_weight, raw.dtype)
    return first * cos[None, :] + second * sin[None, :]


@triton.jit
def begin(
    row_ptr,
    query_stride,
    keys_ptr,
    values_ptr,
    slot_stride,
    head,
    in_group,
    scale,
    owner,
    newest,
    eps,
    best,
    weight,
    acc,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    CAP: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Load the query heads of a row and a KV head, and initialize their softmax.

    Without `newest` the heads are rotated already, and the softmax starts empty. With it, from `load_newest`, they are
    rotated here; the softmax of its `owner`, the program with the newest position, starts with the newest key and
    value, which it stores in the pool.

    row_ptr: the row's queries, QUERIES tokens query_stride apart, with `newest` a single one followed by its keys and
    values; in_group: mask of the tile's query heads, token after token, from `in_head`; scale, CAP: as in `attend`;
    best, weight: [ROWS], acc: [ROWS, WIDE]: empty. Returns the query tile in the dtype of the matmuls, [ROWS, WIDE],
    and the initialized best, weight and acc.
    """
    ROWS: tl.constexpr = acc.shape[0]
    WIDE: tl.constexpr = acc.shape[1]
    d = tl.arange(0, WIDE)[None, :]
    g = tl.arange(0, ROWS)[:, None]
    heads_ptr = row_ptr + (head * GROUP + g) * D
    if QUERIES > 1:
        heads_ptr = row_ptr + g // GROUP * query_stride + (head * GROUP + g % GROUP) * D
    if newest is None:
        q = cast_query(tl.load(heads_ptr + d, mask=in_group, other=0.0), keys_ptr)
    else:
        slot, partner, cos, sin, q_weight, q_partner, k_weight, k_partner, key_scale, value_scale = newest
        dtype: tl.constexpr = row_ptr.dtype.element_ty
        inside = d < D
        key_ptr = row_ptr + (KV_HEADS * GROUP + head) * D
        value = tl.load(key_ptr + KV_HEADS * D + d, mask=inside, other=0.0)
        key = _rotated(key_ptr, inside, partner, cos, sin, k_weight, k_partner, eps, D, NORM).to(dtype)
        q = _rotated(heads_ptr, in_group, partner, cos, sin, q_weight, q_partner, eps, D, NORM)
        if SCALED:
            q = q * key_scale
        q = cast_query(q.to(dtype), keys_ptr)
        key, value = stored(key, keys_ptr, key_scale, SCALED), stored(value, values_ptr, value_scale, SCALED)
        offs = slot.to(tl.int64) * slot_stride + head * D + d
        tl.store(keys_ptr + offs, key, mask=owner & inside)
        tl.store(values_ptr + offs, value, mask=owner & inside)
        score = apply_softcap(tl.sum(q.to(tl.float32) * key.to(q.dtype).to(tl.float32), axis=1) * scale, CAP)
        best = tl.where(owner, score, best)
        weight = tl.where(owner, 1.0, weight)
        acc = tl.where(owner, tl.broadcast_to(value.to(tl.float32), [ROWS, WIDE]), acc)
    return q, best, weight, acc
