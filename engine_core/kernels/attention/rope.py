"""Rotary embedding in Triton, fused with the KV write.

QK norms can be fused too. A program processes a few heads of one token, of any kind: queries, keys and values are
adjacent in the output of the QKV projection. A head is loaded as pairs of elements: first the rotated ones, R / 2 apart
in the head's first R elements, then the two halves of the rest. Oracle: `reference.layer.qk_norm_rope_and_kv_write`.
`pdl`: see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.paged_pool import check_head_dim, check_heads, head_width, stored

ELEMENTS, WARPS = 1024, 2
"""Elements and warps per program."""


@triton.jit
def _finite_or_zero(x):
    """Replace NaN and infinite elements by 0."""
    wide = x.to(tl.float32)
    return tl.where(wide * 0.0 == 0.0, wide, 0.0).to(x.dtype)


@triton.jit
def _rope_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    slot_mapping_ptr,
    q_norm_ptr,
    k_norm_ptr,
    scales_ptr,
    qkv_stride,
    cos_stride,
    sin_stride,
    slot_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTARY_PAIRS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    ISOLATE: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.arange(0, PAIRS)
    # Indices of each pair. Runs of `ALIGNED` pairs are contiguous, which allows vector loads and stores.
    i, j = pair, pair + D // 2
    if ROTARY_PAIRS < D // 2:
        i += tl.where(pair < ROTARY_PAIRS, 0, ROTARY_PAIRS)
        j -= tl.where(pair < ROTARY_PAIRS, D // 2 - ROTARY_PAIRS, 0)
        i = tl.max_contiguous(tl.multiple_of(i, ALIGNED), ALIGNED)
        j = tl.max_contiguous(tl.multiple_of(j, ALIGNED), ALIGNED)
    inside = pair < D // 2
    is_query = (head < HEADS)[:, None] & inside[None, :]
    is_key = ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None] & inside[None, :]
    is_value = ((head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS))[:, None] & inside[None, :]
    if NORM:
        first_weight = tl.where(
            is_query, tl.load(q_norm_ptr + i, mask=inside)[None, :], tl.load(k_norm_ptr + i, mask=inside)[None, :]
        )
        second_weight = tl.where(
            is_query, tl.load(q_norm_ptr + j, mask=inside)[None, :], tl.load(k_norm_ptr + j, mask=inside)[None, :]
        )
    key_scale, value_scale = 1.0, 1.0
    if SCALED:
        key_scale, value_scale = tl.load(scales_ptr), tl.load(scales_ptr + 1)
    wait_for_previous(PDL)
    # A gate follows each query.
    stored_head = head + tl.minimum(head, HEADS) if GATED else head
    source = qkv_ptr + token * qkv_stride + stored_head[:, None] * D
    first_raw = tl.load(source + i[None, :], mask=is_query | is_key | is_value, other=0.0)
    second_raw = tl.load(source + j[None, :], mask=is_query | is_key | is_value, other=0.0)
    slot = tl.load(slot_mapping_ptr + token)
    # Both halves of the cosines are equal, and the first half of the sines is the second negated: load half of each.
    turns = pair < ROTARY_PAIRS
    c = tl.load(cos_ptr + token * cos_stride + pair, mask=turns, other=1.0)[None, :]
    s = tl.load(sin_ptr + token * sin_stride + ROTARY_PAIRS + pair, mask=turns, other=0.0)[None, :]
    dtype: tl.constexpr = first_raw.dtype
    first, second = first_raw.to(tl.float32), second_raw.to(tl.float32)
    if NORM:
        mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / D
        inverse = tl.rsqrt(mean + eps)[:, None]
        # Round to the weight's dtype and then to the head's, as in `norm.normalize`.
        first = ((first * inverse).to(first_weight.dtype).to(tl.float32) * first_weight.to(tl.float32)).to(dtype)
        second = ((second * inverse).to(second_weight.dtype).to(tl.float32) * second_weight.to(tl.float32)).to(dtype)
        first, second = first.to(tl.float32), second.to(tl.float32)
    rotated_first = first * c - second * s
    rotated_second = second * c + first * s

    out = query_ptr + (token * HEADS + head[:, None]) * D
    if SCALED:
        tl.store(out + i[None, :], (rotated_first * key_scale).to(dtype), mask=is_query)
        tl.store(out + j[None, :], (rotated_second * key_scale).to(dtype), mask=is_query)
    else:
        tl.store(out + i[None, :], rotated_first.to(dtype), mask=is_query)
        tl.store(out + j[None, :], rotated_second.to(dtype), mask=is_query)
    slot_offset = slot.to(tl.int64) * slot_stride
    first_value = stored(first_raw, values_ptr, value_scale, SCALED)
    second_value = stored(second_raw, values_ptr, value_scale, SCALED)
    if ISOLATE:
        # Keys and values of a head may be in different programs.
        value = source + KV_HEADS * D
        first_own = stored(tl.load(value + i[None, :], mask=is_key, other=0.0), values_ptr, value_scale, SCALED)
        second_own = stored(tl.load(value + j[None, :], mask=is_key, other=0.0), values_ptr, value_scale, SCALED)
        invalid = tl.sum(first_own.to(tl.float32) * 0.0 + second_own.to(tl.float32) * 0.0, axis=1) != 0.0
        rotated_first = tl.where(invalid[:, None], float("nan"), rotated_first)
        rotated_second = tl.where(invalid[:, None], float("nan"), rotated_second)
        first_value, second_value = _finite_or_zero(first_value), _finite_or_zero(second_value)
    out = keys_ptr + slot_offset + (head[:, None] - HEADS) * D
    tl.store(out + i[None, :], stored(rotated_first.to(dtype), keys_ptr, key_scale, SCALED), mask=is_key)
    tl.store(out + j[None, :], stored(rotated_second.to(dtype), keys_ptr, key_scale, SCALED), mask=is_key)
    out = values_ptr + slot_offset + (head[:, None] - HEADS - KV_HEADS) * D
    tl.store(out + i[None, :], first_value, mask=is_value)
    tl.store(out + j[None, :], second_value, mask=is_value)


def rope_and_kv_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    keys: Tensor,
    values: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    scales: Tensor | None = None,
    isolate: bool = False,
    gated: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Apply RoPE to queries and keys, and store keys and values in the pool.

    Queries and keys are normalized first if norm weights are given. isolate: see `reference.layer.rope_and_kv_write`;
    gated: whether a gate follows each query in qkv, as in `reference.layer.without_gates`.

    qkv: [T, heads + 2 * kv_heads, D], heads contiguous, D one of `HEAD_DIMS`; cos, sin: [T, 1, R] float32 as in
    `reference.layer.rope`, R even and at most D; slot_mapping: [T] int64; keys, values: [slots, kv_heads, D], written,
    with equal slot strides; q_norm, k_norm: [D], both or neither (Qwen 3, Gemma 3); scales: of an 8-bit pool, as in
    `kv_dtype`, which the preceding kernel must not write. Dtypes are float32, bfloat16 or float16, equal except for the
    tables; keys and values may be as in `kv_dtype`, the norms float32. Returns the rotated queries, multiplied by the
    key scale, [T, heads, D], contiguous. Raises ValueError for an unsupported D, R or layout.
    """
    tokens, all_heads, head_dim = qkv.shape
    kv_heads = keys.shape[1]
    heads = (all_heads - 2 * kv_heads) // 2 if gated else all_heads - 2 * kv_heads
    check_head_dim(head_dim)
    check_heads(qkv, keys, values)
    Rotation(cos, sin, slot_mapping, q_norm, k_norm, eps).check(head_dim)
    query = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return query
    block = max(1, ELEMENTS // head_width(head_dim))
    _rope_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, block))](
        *(query, keys, values, qkv, cos, sin, slot_mapping),
        *(qkv if given is None else given for given in (q_norm, k_norm, scales)),
        *(qkv.stride(0), cos.stride(0), sin.stride(0), keys.stride(0), eps),
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        PAIRS=head_width(head_dim) // 2,
        ROTARY_PAIRS=cos.shape[2] // 2,
        ALIGNED=_largest_power_of_two(math.gcd(cos.shape[2] // 2, head_dim // 2)),
        BLOCK=block,
        NORM=q_norm is not None,
        SCALED=scales is not None,
        ISOLATE=isolate,
        GATED=gated,
        PDL=pdl,
        num_warps=WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )
    return query


def _largest_power_of_two(number: int) -> int:
    """Return the largest power of two that divides a number."""
    return number & -number
