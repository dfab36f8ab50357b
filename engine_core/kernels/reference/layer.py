"""Operations of a transformer layer in plain torch: the oracle of the fused kernels, and the CPU implementation."""

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.kv_dtype import to_pool, write_pool


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up, [T, width]: SwiGLU or GeGLU (Shazeer, 2020).

    gate_up: [T, 2 * width], gate first.
    """
    gate, up = gate_up.chunk(2, -1)
    if activation is Activation.SILU:
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh") * up


def gather_columns(x: Tensor, order: Tensor) -> Tensor:
    """Return columns of x in the given order, [T, width].

    x: [T, inputs]; order: column indices, [width] int32.
    """
    return x.index_select(1, order)


def rms_norm(x: Tensor, weight: Tensor, eps: float, order: Tensor | None = None) -> Tensor:
    """Return the RMSNorm of each row.

    It is x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019).

    x: [T, hidden], normalized over the last dimension; weight: [hidden], in x's dtype or float32. The quotient is
    computed in float32 and rounded to the weight's dtype before the multiplication: this equals transformers' Llama
    with a weight in x's dtype, and its Gemma, which rounds only the result, with one in float32. order: permutation of
    the output's columns, as in `gather_columns`, here and below.
    """
    normed = (functional.rms_norm(x.float(), x.shape[-1:], None, eps).to(weight.dtype) * weight).to(x.dtype)
    return normed if order is None else gather_columns(normed, order)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, order: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalize the sum.

    Returns the normalized sum, and the sum, which is never permuted. All are [T, hidden].
    """
    total = x + residual
    return rms_norm(total, weight, eps, order), total


def norm_add_rms_norm(
    x: Tensor, x_weight: Tensor, residual: Tensor, weight: Tensor, eps: float, order: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run `add_rms_norm` on rms_norm(x) with the weight x_weight, [hidden].

    Gemma 2 and 3 also normalize the output of a block before the residual addition.
    """
    return add_rms_norm(rms_norm(x, x_weight, eps), residual, weight, eps, order)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Replace logits by cap * tanh(logits / cap) in place, and return them.

    Each of the three operations is rounded to the logits' dtype, as in transformers (Gemma 2).
    """
    return logits.div_(cap).tanh_().mul_(cap)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding to the first R elements of each head.

    Pairs of elements R / 2 apart, (x1, x2), become (x1 c - x2 s, x2 c + x1 s) (Su et al., 2021). The elements past R
    are unchanged.

    x: [T, heads, head_dim]; cos: [T, 1, R] float32, its halves equal; sin: likewise, its first half negated. Computed
    in float32, returned in x's dtype.
    """
    return _rotate(x, cos, sin).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `rope` in float32."""
    wide, rotary_dim = x.float(), cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((_rotate(wide[..., :rotary_dim], cos, sin), wide[..., rotary_dim:]), -1)
    swapped = wide.roll(rotary_dim // 2, -1)
    return torch.addcmul(wide * cos, swapped, sin)


def rope_and_kv_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None = None,
    isolate: bool = False,
) -> Tensor:
    """Apply RoPE to queries and keys, and store keys and values in the pool.

    qkv: [T, heads + 2 * kv_heads, head_dim]; cos, sin: as in `rope`; slot_mapping: [T] int64, slots of the pool; keys,
    values: [num_slots, kv_heads, head_dim], written, in qkv's dtype or as in `kv_dtype`; scales: of keys and values, as
    in `kv_dtype`; isolate: where a token's value for a head is not finite, store zeros for its invalid elements and NaN
    for its key: a token that sees it still gets NaN from attention, but one that multiplies it by 0 does not. Returns
    the rotated queries, [T, heads, head_dim], multiplied by the key scale before rounding.
    """
    kv_heads = keys.shape[1]
    query_heads = qkv.shape[1] - 2 * kv_heads
    key_scale, value_scale = (None, None) if scales is None else scales.unbind(0)
    rotated = _rotate(qkv[:, : query_heads + kv_heads], cos, sin)
    query = rotated[:, :query_heads]
    key, value = rotated[:, query_heads:], qkv[:, query_heads + kv_heads :]
    if isolate:
        valid = to_pool(value, values.dtype, value_scale).float().isfinite()
        key = key.masked_fill(~valid.all(-1, keepdim=True), torch.nan)
        value = value.masked_fill(~valid, 0.0)
    write_pool(keys, slot_mapping, key.to(qkv.dtype), key_scale)
    write_pool(values, slot_mapping, value, value_scale)
    return (query if key_scale is None else query * key_scale).to(qkv.dtype)


def without_gates(qkv: Tensor, kv_heads: int) -> Tensor:
    """Return queries, keys and values, [T, heads + 2 * kv_heads, head_dim], contiguous.

    qkv: [T, 2 * heads + 2 * kv_heads, head_dim], each query followed by its gate.
    """
    gates_end = qkv.shape[1] - 2 * kv_heads
    return torch.cat((qkv[:, :gates_end:2], qkv[:, gates_end:]), 1)


def qk_norm(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, kv_heads: int, eps: float) -> Tensor:
    """Normalize each query and key head, before RoPE.

    Used by Qwen 3 and Gemma 3 (Henry et al., 2020).

    qkv: [T, heads + 2 * kv_heads, head_dim]; q_norm, k_norm: [head_dim]. Returns a new tensor of qkv's shape, with
    copies of the value heads.
    """
    query_heads = qkv.shape[1] - 2 * kv_heads
    keys_end = query_heads + kv_heads
    query, key = qkv[:, :query_heads], qkv[:, query_heads:keys_end]
    return torch.cat((rms_norm(query, q_norm, eps), rms_norm(key, k_norm, eps), qkv[:, keys_end:]), 1)


def qk_norm_rope_and_kv_write(
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
) -> Tensor:
    """Run `qk_norm` if norm weights are given, then `rope_and_kv_write`. gated: as in `without_gates`, of qkv."""
    if gated:
        qkv = without_gates(qkv, keys.shape[1])
    if q_norm is not None and k_norm is not None:
        qkv = qk_norm(qkv, q_norm, k_norm, keys.shape[1], eps)
    return rope_and_kv_write(qkv, cos, sin, slot_mapping, keys, values, scales, isolate)
