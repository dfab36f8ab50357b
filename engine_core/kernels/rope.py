"""Rotary embedding in Triton, fused with the KV write.

Norms of queries and keys can be fused too. A program takes a few heads of one token, whatever their kind: queries, keys
and values are adjacent in the output of the projection. Oracle: `reference.layer.qk_norm_rope_and_kv_write`. `pdl`: see
the head of `kernels.norm`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels import kv_dtype
from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.paged_pool import check_head_dim, check_heads

LARGEST = tl.constexpr(kv_dtype.LARGEST)
ELEMENTS, WARPS = 1024, 2
"""Elements that one program rotates, and its warps."""


@triton.jit
def _stored(x, pool_ptr):
    """Convert x to the pool's dtype, as `kv_dtype.to_pool` does."""
    dtype: tl.constexpr = pool_ptr.dtype.element_ty
    if dtype.is_fp8():
        x = tl.clamp(x.to(tl.float32), -LARGEST, LARGEST)
    return x.to(dtype)


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
    qkv_stride,
    cos_stride,
    sin_stride,
    slot_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.arange(0, HALF)
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    mask = (head < HEADS + 2 * KV_HEADS)[:, None]
    if NORM:
        first_weight = tl.where(
            is_query[:, None], tl.load(q_norm_ptr + pair)[None, :], tl.load(k_norm_ptr + pair)[None, :]
        )
        second_weight = tl.where(
            is_query[:, None], tl.load(q_norm_ptr + HALF + pair)[None, :], tl.load(k_norm_ptr + HALF + pair)[None, :]
        )
    wait_for_previous(PDL)
    source = qkv_ptr + token * qkv_stride + head[:, None] * D + pair[None, :]
    first_raw = tl.load(source, mask=mask, other=0.0)
    second_raw = tl.load(source + HALF, mask=mask, other=0.0)
    slot = tl.load(slot_mapping_ptr + token)
    # The cosine's halves are equal and the sine's first half is its second, negated: half of each is enough.
    c = tl.load(cos_ptr + token * cos_stride + pair)[None, :]
    s = tl.load(sin_ptr + token * sin_stride + HALF + pair)[None, :]
    dtype: tl.constexpr = first_raw.dtype
    first, second = first_raw.to(tl.float32), second_raw.to(tl.float32)
    if NORM:
        mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / D
        inverse = tl.rsqrt(mean + eps)[:, None]
        # Rounded to the weight's dtype and then to the head's, as in `norm.normalised`.
        first = ((first * inverse).to(first_weight.dtype).to(tl.float32) * first_weight.to(tl.float32)).to(dtype)
        second = ((second * inverse).to(second_weight.dtype).to(tl.float32) * second_weight.to(tl.float32)).to(dtype)
        first, second = first.to(tl.float32), second.to(tl.float32)
    rotated_first = (first * c - second * s).to(dtype)
    rotated_second = (second * c + first * s).to(dtype)

    out = query_ptr + (token * HEADS + head[:, None]) * D + pair[None, :]
    tl.store(out, rotated_first, mask=is_query[:, None])
    tl.store(out + HALF, rotated_second, mask=is_query[:, None])
    slot_offset = slot.to(tl.int64) * slot_stride
    out = keys_ptr + slot_offset + (head[:, None] - HEADS) * D + pair[None, :]
    tl.store(out, _stored(rotated_first, out), mask=is_key[:, None])
    tl.store(out + HALF, _stored(rotated_second, out), mask=is_key[:, None])
    out = values_ptr + slot_offset + (head[:, None] - HEADS - KV_HEADS) * D + pair[None, :]
    tl.store(out, _stored(first_raw, out), mask=is_value[:, None])
    tl.store(out + HALF, _stored(second_raw, out), mask=is_value[:, None])


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
    pdl: bool = False,
) -> Tensor:
    """Rotate queries and keys, and store keys and values in the pool.

    Queries and keys are normalised first where norm weights are given.

    qkv: [T, heads + 2 * kv_heads, D], heads contiguous, D one of 32, 64, 128, 256; cos, sin: [T, 1, D] float32 as in
    `reference.layer.rope`; slot_mapping: [T] int64; keys, values: [slots, kv_heads, D], written, with one stride for
    slots; q_norm, k_norm: [D], both or neither (Qwen 3, Gemma 3). Dtypes float32, bfloat16 or float16, all but the
    tables' the same; keys and values may be as in `kv_dtype`, the norms float32. Returns the rotated queries, [T,
    heads, D], contiguous. Raises ValueError for another D or layout.
    """
    tokens, all_heads, head_dim = qkv.shape
    kv_heads = keys.shape[1]
    heads = all_heads - 2 * kv_heads
    check_head_dim(head_dim)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("the norms of queries and keys must both be given, or neither")
    check_heads(qkv, keys, values)
    if cos.stride(2) != 1 or sin.stride(2) != 1:
        raise ValueError("each row of cosines and sines must be contiguous")
    query = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return query
    block = max(1, ELEMENTS // head_dim)
    _rope_kernel[(tokens, triton.cdiv(all_heads, block))](
        *(query, keys, values, qkv, cos, sin, slot_mapping),
        *(qkv if norm is None else norm for norm in (q_norm, k_norm)),
        *(qkv.stride(0), cos.stride(0), sin.stride(0), keys.stride(0), eps),
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        HALF=head_dim // 2,
        BLOCK=block,
        NORM=q_norm is not None,
        PDL=pdl,
        num_warps=WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )
    return query
