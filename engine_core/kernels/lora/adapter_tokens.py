"""Adapters of the tokens of a step, as linear layers get them."""

from dataclasses import dataclass

from torch import Tensor

BASE_SLOT = 0
"""Slot of tokens without an adapter; those of adapters count from 1."""


@dataclass(frozen=True, slots=True)
class AdapterTokens:
    """Tokens of a step by the slot of their adapter, the same for all layers."""

    slots: Tensor
    """[T] int32: slot of each token's adapter, BASE_SLOT for none and for padding."""
