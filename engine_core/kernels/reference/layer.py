"""The arithmetic of a transformer layer in plain torch: what every faster kernel is compared with, and the CPU path."""

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.kv_dtype import write_pool


def gelu_mul(gate_up: Tensor) -> Tensor:
    """GeGLU's product (Shazeer, 2020) with GELU's tanh approximation: gelu(gate) * up.

    gate_up: [T, 2 * width], gate first. Returns [T, width].
    """
    gate, up = gate_up.chunk(2, -1)
    return functional.gelu(gate, approximate="tanh") * up


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm (Zhang and Sennrich, 2019) over the last dimension: x / sqrt(mean(x^2) + eps) * weight.

    x: [T, hidden]; weight: [hidden]. The quotient is computed in float32 and rounded to x's dtype before the product.
    """
    return functional.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds x to the residual stream and normalises the sum. All [T, hidden]; returns (normalised, sum)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021), pairs half a head apart: (x1, x2) -> (x1 c - x2 s, x2 c + x1 s).

    x: [T, heads, head_dim]; cos: [T, 1, head_dim] float32, its halves equal; sin: likewise, its first half negated.
    Computed in float32, returned in x's dtype.
    """
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(wide * cos, swapped, sin).to(x.dtype)


def rope_and_kv_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, slot_mapping: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Rotates queries and keys, and stores keys and values in the pool.

    qkv: [T, heads + 2 * kv_heads, head_dim]; cos, sin: as in `rope`; slot_mapping: [T] int64, places in the pool;
    keys, values: [places, kv_heads, head_dim], written, in qkv's dtype or as in `kv_dtype`. Returns the rotated
    queries, [T, heads, head_dim].
    """
    kv_heads = keys.shape[1]
    query_heads = qkv.shape[1] - 2 * kv_heads
    rotated = rope(qkv[:, : query_heads + kv_heads], cos, sin)
    write_pool(keys, slot_mapping, rotated[:, query_heads:])
    write_pool(values, slot_mapping, qkv[:, query_heads + kv_heads :])
    return rotated[:, :query_heads]


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's product (Shazeer, 2020): silu(gate) * up. gate_up: [T, 2 * width], gate first. Returns [T, width]."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def qk_norm(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, kv_heads: int, eps: float) -> Tensor:
    """RMSNorm over each query and key head before the rotation, as Qwen 3 and Gemma 3 have it (Henry et al., 2020).

    qkv: [T, heads + 2 * kv_heads, head_dim]; q_norm, k_norm: [head_dim]. Returns a new tensor of qkv's shape, whose
    value heads are copies.
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
) -> Tensor:
    """`reference.rope_and_kv_write` after `qk_norm`, which is left out where there are no norm weights."""
    if q_norm is not None and k_norm is not None:
        qkv = qk_norm(qkv, q_norm, k_norm, keys.shape[1], eps)
    return rope_and_kv_write(qkv, cos, sin, slot_mapping, keys, values)
