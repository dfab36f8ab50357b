"""Rotation of the heads of new tokens, as attention is handed it."""

from typing import NamedTuple

from torch import Tensor


class Rotation(NamedTuple):
    """The rotation of T tokens, and where their keys and values are stored.

    Some models normalise query and key heads before it.
    """

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
        """Raise ValueError for tables that do not fit a head, or for one norm alone."""
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("the norms of queries and keys must both be given, or neither")
        cosines, sines = self.cos.shape[2], self.sin.shape[2]
        if self.cos.shape != self.sin.shape or cosines % 2 or not 2 <= cosines <= head_dim:
            raise ValueError(
                f"tables of {cosines} cosines and {sines} sines a position cannot turn a head of {head_dim}"
            )
        if self.cos.stride(2) != 1 or self.sin.stride(2) != 1:
            raise ValueError("each row of cosines and sines must be contiguous")
