"""Adapters of the tokens of a step, as linear layers get them."""

from dataclasses import dataclass

from torch import Tensor

BASE_SLOT = 0
"""Slot of tokens without an adapter; those of adapters count from 1."""


@dataclass(frozen=True, slots=True)
class AdapterBlocks:
    """Tokens in blocks of one adapter each, for the kernels."""

    order: Tensor
    """[N, M] int32: indices of each block's tokens, ascending; -1 for none, at the end of a block."""
    slots: Tensor
    """[N] int32: slot of each block's adapter, BASE_SLOT for a block without tokens."""


@dataclass(frozen=True, slots=True)
class AdapterTokens:
    """Tokens of a step by the slot of their adapter, the same for all layers."""

    slots: Tensor
    """[T] int32: slot of each token's adapter, BASE_SLOT for none and for padding."""
    blocks: AdapterBlocks | None = None
    """The tokens in blocks; None for implementations in torch."""
