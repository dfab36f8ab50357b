"""Memory of the gated delta rule: its sizes, and its tensors by row of the device's tables.

A value head keeps a matrix S of [key_dim, value_dim], which token t updates (Yang et al., 2025):

    S <- exp(g_t) S;  u_t = beta_t (v_t - S^T k_t);  S <- S + k_t u_t^T;  o_t = S^T q_t

The memory holds S as it was a few tokens ago, `base`, and the keys and updates of the tokens since then, the ring. With
G_t, the sum of g since the base, S = exp(G_t) base + sum over j of exp(G_t - G_j) k_j u_j^T. So most steps read the
base and do not write it. After tokens 0 to p - 1, the base covers the first `base_length(p, ring)` of them; the base is
written at multiples of the ring's size. Inputs of the convolution are kept from `conv_width - 1` before the base on: a
copy of these and of the base is a checkpoint from which another row can continue (`checkpoints.py`).

A step that verifies drafts computes several tokens of a row, of which it may reject all but the first. It adds all of
them to the ring, which has room for that many more, and keeps the base as it was at the first. Once the drafts are
accepted, `accepted.py` writes the base of the rows that have passed a multiple of the ring's size. Rejected tokens are
never read: those that a row computes next overwrite them.

A row has no content before position 0: whatever the memory holds then counts as zeros.
"""

from dataclasses import dataclass

import torch
from msgspec import Struct
from torch import Tensor

RING = 16
"""Tokens between two writes of the base, which is also the usual size of KV pages."""
L2_EPS = 1e-6
"""Added to the sum of squares of a query or key head."""
PIECE = 64
"""Maximum number of positions of a prompt that are computed at once, from one multiple of this to the next."""


class DeltaRuleShape(Struct, frozen=True, kw_only=True):
    """Sizes of a layer with the gated delta rule."""

    key_heads: int
    """Heads of queries and keys. Head j serves `value_heads / key_heads` consecutive value heads."""
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    """Positions that the convolution sees, the token's own included."""

    def check_heads(self) -> None:
        """Raise ValueError for heads of other sizes than powers of two from 16 on, which the Triton kernels need."""
        for name, size in (("linear_key_head_dim", self.key_dim), ("linear_value_head_dim", self.value_dim)):
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} {size} is not supported; it must be a power of two from 16 on")

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values, in this order."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def values(self) -> int:
        """Channels of the values."""
        return self.value_heads * self.value_dim

    def num_columns(self, ring: int = RING, max_drafts: int = 0) -> int:
        """Return the number of positions for which inputs of the convolution are kept."""
        return ring + max_drafts + self.conv_width - 1

    def row_bytes(self, itemsize: int, ring: int = RING, max_drafts: int = 0) -> int:
        """Return the bytes of one row of a layer; see `DeltaRuleState.allocate`. itemsize: of the model's dtype."""
        wide = self.value_heads * (self.key_dim * self.value_dim + (ring + max_drafts) * self.value_dim + 2 * ring)
        narrow = 2 * ring * self.key_heads * self.key_dim + self.num_columns(ring, max_drafts) * self.channels
        return 4 * wide + itemsize * narrow

    def checkpoint_bytes(self, itemsize: int) -> int:
        """Return the bytes of one checkpoint of a layer. itemsize: of the model's dtype."""
        state = self.value_heads * self.key_dim * self.value_dim
        return 4 * state + itemsize * (self.conv_width - 1) * self.channels


@dataclass(frozen=True, slots=True)
class DeltaRuleState:
    """Memory of one layer for all rows; row 0 is padding and is neither read nor written.

    Rows come first in every tensor.
    """

    base: Tensor
    """[rows, value_heads, key_dim, value_dim] float32."""
    updates: Tensor
    """[rows, value_heads, U, value_dim] float32, with U = R + drafts of a step: u of position p is at index p % U."""
    keys: Tensor
    """[rows, key_heads, 2 * R, key_dim] in the model's dtype, normalized: the key of position p is at p % (2 * R).

    Twice the size of the ring, as programs that fold a full ring read keys while another writes the next one.
    """
    decays: Tensor
    """[rows, value_heads, 2 * R] float32: G of each position since the base, at the index of the key."""
    columns: Tensor
    """[rows, C, channels] in the model's dtype, with C = U + conv_width - 1: last inputs of the convolution. Position p
    is at index p % C."""

    @property
    def ring(self) -> int:
        """Size R of the ring, without the drafts of a step."""
        return self.keys.shape[-2] // 2

    @property
    def num_updates(self) -> int:
        """Number U of tokens whose updates are kept: those of the ring, and the drafts of a step."""
        return self.updates.shape[-2]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """All tensors, in the order of the fields."""
        return self.base, self.updates, self.keys, self.decays, self.columns

    @classmethod
    def allocate(
        cls,
        shape: DeltaRuleShape,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        ring: int = RING,
        max_drafts: int = 0,
    ) -> "DeltaRuleState":
        """Allocate the memory of a layer.

        rows: the padding row included; dtype: of the model; max_drafts: of a row in a step that verifies drafts, at
        most `ring`.
        """
        assert max_drafts <= ring, f"keys and decays of {2 * ring} positions, for {max_drafts} drafts"

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(rows, *sizes, dtype=dtype, device=device)

        return cls(
            base=empty(shape.value_heads, shape.key_dim, shape.value_dim),
            updates=empty(shape.value_heads, ring + max_drafts, shape.value_dim),
            keys=empty(shape.key_heads, 2 * ring, shape.key_dim, dtype=dtype),
            decays=empty(shape.value_heads, 2 * ring),
            columns=empty(shape.num_columns(ring, max_drafts), shape.channels, dtype=dtype),
        )


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Memory of all recurrent layers of a model."""

    stacked: DeltaRuleState
    """All layers; the tensors have a first dimension of layers."""
    layers: tuple[DeltaRuleState, ...]
    """A view for each layer."""

    @classmethod
    def allocate(
        cls,
        shape: DeltaRuleShape,
        layers: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        max_drafts: int = 0,
    ) -> "ModelStates":
        """Allocate the memory of all layers; see `DeltaRuleState.allocate`."""
        flat = DeltaRuleState.allocate(shape, layers * rows, dtype, device, max_drafts=max_drafts)
        tensors = [tensor.view(layers, rows, *tensor.shape[1:]) for tensor in flat.tensors]
        return cls(DeltaRuleState(*tensors), tuple(DeltaRuleState(*own) for own in zip(*tensors, strict=True)))


def base_length(position: int, ring: int) -> int:
    """Return the number of tokens in the base after those before a position; the ring holds the others."""
    return ring * ((position - 1) // ring) if position else 0


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Table row and position of each of the T tokens of a step.

    The tokens of a row are adjacent and their positions consecutive; every row appears once. Tokens of row 0 are
    padding, in any number and order.
    """

    rows: Tensor
    """[T] int32."""
    positions: Tensor
    """[T] int32 or int64."""
    num_single: int = 0
    """Number of leading tokens that are the only one of their row, or padding."""
    max_spans: int = 0
    """Largest number of rows that the other tokens can belong to."""
    queries: int = 1
    """More than 1 in a step that verifies drafts: each row has this many adjacent tokens, of which a number from the
    first on are at consecutive positions, and the others are padding. None are single then."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The tokens of a step after the first `num_single`, split by row and at multiples of PIECE.

    All three tensors are computed on the device.
    """

    counts: Tensor
    """[2] int32: numbers of pieces and of spans."""
    pieces: Tensor
    """[max_pieces, 2] int32: begin and end of each piece, as indices of tokens."""
    spans: Tensor
    """[max_spans, 2] int32: begin and end of each row, as indices of pieces."""


def max_pieces(tokens: int, spans: int) -> int:
    """Return the largest number of pieces. spans: largest number of rows that the tokens belong to.

    Two tokens of a row can be two pieces; every other piece takes PIECE tokens more.
    """
    return min(tokens, 2 * spans + max(0, tokens - 2 * spans) // PIECE)
