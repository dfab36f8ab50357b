"""Rotary embedding and KV write with norms of queries and keys, in plain torch: the oracle of `kernels.rope`."""

import torch
from torch import Tensor

from tandem.engine_core.kernels.reference.layer import rms_norm, rope_and_kv_write


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
    kv_index: Tensor,
    keys: Tensor,
    values: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """`reference.rope_and_kv_write` after `qk_norm`, which is left out where there are no norm weights."""
    if q_norm is not None and k_norm is not None:
        qkv = qk_norm(qkv, q_norm, k_norm, keys.shape[1], eps)
    return rope_and_kv_write(qkv, cos, sin, kv_index, keys, values)
