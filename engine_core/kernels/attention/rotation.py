"""What the heads of new tokens are rotated with, and where their keys and values are stored."""

from typing import NamedTuple

from torch import Tensor


class Rotation(NamedTuple):
    """The rotation of T tokens, with norms of query and key heads before it where a model has them."""

    cos: Tensor
    """[T, 1, R] float32 as in `reference.layer.rope`, R even and at most head_dim."""
    sin: Tensor
    """[T, 1, R] float32, its first half negated."""
    slot_mapping: Tensor
    """[T] int64, slot of each token's key and value."""
    q_norm: Tensor | None = None
    """[head_dim], factors of the norm of query heads. None: there is none, nor one of key heads."""
    k_norm: Tensor | None = None
    """[head_dim], those of key heads."""
    eps: float = 1e-6
    """Of both norms."""

    def check(self, head_dim: int) -> None:
        """Raise ValueError for tables that a head cannot be rotated with, or one norm without the other."""
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("the norms of queries and keys must both be given, or neither")
        cosines, sines = self.cos.shape[2], self.sin.shape[2]
        if self.cos.shape != self.sin.shape or cosines % 2 or not 2 <= cosines <= head_dim:
            raise ValueError(
                f"tables of {cosines} cosines and {sines} sines a position cannot turn a head of {head_dim}"
            )
        if self.cos.stride(2) != 1 or self.sin.stride(2) != 1:
            raise ValueError("each row of cosines and sines must be contiguous")
