"""How a mixture of experts routes tokens, and the result of routing a step."""

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class Routing(Enum):
    """How the weights of a token's experts follow from the router's logits.

    The experts are always the k with the largest logits, ties to the lowest index.
    """

    SOFTMAX = "softmax over all experts, then top-k"
    """The weights are the softmax over all experts, so they sum to less than 1."""
    TOP_K_SOFTMAX = "softmax over the top-k"
    """The weights sum to 1. Softmax over all experts, top-k and renormalization give the same."""

    @property
    def renormalizes(self) -> bool:
        """True if a token's weights sum to 1."""
        return self is Routing.TOP_K_SOFTMAX


@dataclass(frozen=True, slots=True, eq=False)
class SharedOutput:
    """Output of the expert that all tokens use, to be weighted by sigmoid(gate(x)), one number for each token."""

    output: Tensor
    """[T, hidden]."""
    x: Tensor
    """[T, hidden], inputs of all experts."""
    gate: Tensor
    """[1, hidden], weight of the gate, in x's dtype or float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """The experts of each token of a step.

    A pair is a token and one of its experts. The pair of token t and its j-th expert has index t * k + j.
    """

    ids: Tensor
    """[T, k] int32, the experts of each token by descending weight, then the shared one if it is stored with them; -1
    for padding, which is not routed."""
    weights: Tensor
    """[T, k] float32; 0 for padding."""
    counts: Tensor | None = None
    """[E] int32, number of pairs of each expert; None if the pairs are not sorted."""
    pairs: Tensor | None = None
    """[E, T] int32, indices of the pairs of each expert in undefined order, `counts` of them; None if not sorted. All
    tokens are in the list of the shared expert, including padding."""

    def sorted_pairs(self) -> tuple[Tensor, Tensor]:
        """Return `counts` and `pairs`, which must be there."""
        counts, pairs = self.counts, self.pairs
        assert counts is not None and pairs is not None, "the pairs are not sorted by expert"
        assert pairs.shape == (len(counts), len(self.ids)) and pairs.is_contiguous()
        return counts, pairs
