"""RoPE inputs for new tokens."""

from typing import NamedTuple

from torch import Tensor


class Rotation(NamedTuple):
    """Cosines, sines and KV slots of T tokens, and the weights of QK norms if the model has them."""

    cos: Tensor
    """[T, 1, R] float32 as in `reference.layer.rope`, R even and at most head_dim."""
    sin: Tensor
    """[T, 1, R] float32, with the first half negated."""
    slot_mapping: Tensor
    """[T] int64, slot of each token's key and value."""
    q_norm: Tensor | None = None
    """[head_dim], weight of the norm of query heads. None: neither query nor key heads are normalized."""
    k_norm: Tensor | None = None
    """[head_dim], weight of the norm of key heads."""
    eps: float = 1e-6
    """Epsilon of both norms."""

    def check(self, head_dim: int) -> None:
        """Raise ValueError for tables that do not fit a head, or if only one norm is given."""
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("the norms of queries and keys must both be given, or neither")
        cosines, sines = self.cos.shape[2], self.sin.shape[2]
        if self.cos.shape != self.sin.shape or cosines % 2 or not 2 <= cosines <= head_dim:
            raise ValueError(
                f"tables of {cosines} cosines and {sines} sines per position do not fit a head of {head_dim}"
            )
        if self.cos.stride(2) != 1 or self.sin.stride(2) != 1:
            raise ValueError("each row of cosines and sines must be contiguous")
