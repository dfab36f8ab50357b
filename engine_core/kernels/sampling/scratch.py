"""Scratch memory by which the sampling kernels share results, and its layout."""

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.reference.sampling import CANDIDATES

NOTHING = tl.constexpr(-(1 << 62))
"""A rank below that of every token."""


def num_warps_for(block: int, per_thread: int = 32) -> int:
    """Return the number of warps of a program that holds `block` tokens.

    per_thread: tokens in each thread.
    """
    return max(1, min(8, block // (32 * per_thread)))


@dataclass(frozen=True, slots=True)
class SamplingScratch:
    """Buffers of the sampling kernels, for up to B rows at once in T tiles.

    They take about 8 bytes for each token of the vocabulary and row.

    One instance serves all steps that are enqueued one after the other on one stream, graphs included; a captured
    graph holds these addresses, so the scratch lives at least as long as it.
    """

    vocab_size: int
    tile: int
    """Tokens that a program holds, a power of two. It must not depend on the batch: a row's sums would change."""
    segment: int
    """Tokens of which one is drawn after their segment, a power of two. The drawn tokens depend on it."""
    group: int
    """Tokens of which only the largest counts when top-k looks for its bound, a power of two."""
    pdl: bool
    """Kernels overlap by programmatic dependent launch."""
    winner: Tensor
    """[B] int64, all NOTHING between kernels: the best rank that a tile has offered to its row."""
    arrivals: Tensor
    """[B] int32, zeros between kernels: tiles of a row that are done."""
    tile_best: Tensor
    """[B, T] int64, best rank of each tile."""
    row_best: Tensor
    """[B] int64, best rank of each row that truncation may concern."""
    marks: Tensor
    """[B, >= V] int32, zeros between steps: what applies to each token (see `penalties`)."""
    adjusted: Tensor
    """[B, >= V] float32, strides as in `marks`: logits after bias, penalties, suppression and mask."""
    touched: Tensor
    """[B] int32, nonzero where the row's logits are in `adjusted`."""
    masses: Tensor
    """[B, T * tile / segment] int64, mass of each segment relative to its tile's best token (see `weights`)."""
    candidates: Tensor
    """[B, CANDIDATES] int64, ranks of tokens drawn from the whole softmax; the first is SETTLED where the row has its
    token."""
    weighs: Tensor
    """[B] int32, nonzero where the tokens ahead of the candidates decide which of them stays: 1 by the model's logits,
    2 by those in `adjusted`."""
    ahead: Tensor
    """[B, T, CANDIDATES] float32, weight that ranks ahead of each candidate (`prefix_mass` says of which)."""
    counts: Tensor
    """[B, T, CANDIDATES] float32, number of tokens ahead of each of these candidates."""
    retry_masses: Tensor
    """[B, T * tile / segment] float32, mass of each segment from which a row draws again."""
    peaks: Tensor
    """[B, T, tile / group] float32, group maxima of rows with top-k."""
    found_ids: Tensor
    """[B, capacity] int32, ids of the tokens among which the last one of top-k is searched."""
    found_logits: Tensor
    """[B, capacity] float32, logits of these tokens."""

    @classmethod
    def allocate(
        cls,
        vocab_size: int,
        max_batch: int,
        tile: int,
        segment: int,
        group: int,
        capacity: int,
        device: torch.device,
        pdl: bool = False,
    ) -> "SamplingScratch":
        """Allocate the buffers.

        capacity: tokens of a row among which the last one of top-k is searched fast, a power of two; the others: as in
        the fields.
        """
        tiles = triton.cdiv(vocab_size, tile)
        width = triton.cdiv(vocab_size, 64) * 64

        def buffer(*shape: int, dtype: torch.dtype = torch.float32, fill: int = 0) -> Tensor:
            return torch.full((max_batch, *shape), fill, dtype=dtype, device=device)

        return cls(
            vocab_size=vocab_size,
            tile=tile,
            segment=segment,
            group=group,
            pdl=pdl,
            winner=buffer(dtype=torch.int64, fill=NOTHING.value),
            arrivals=buffer(dtype=torch.int32),
            tile_best=buffer(tiles, dtype=torch.int64),
            row_best=buffer(dtype=torch.int64),
            marks=buffer(width, dtype=torch.int32),
            adjusted=buffer(width),
            touched=buffer(dtype=torch.int32),
            masses=buffer(tiles * (tile // segment), dtype=torch.int64),
            candidates=buffer(CANDIDATES, dtype=torch.int64),
            weighs=buffer(dtype=torch.int32),
            ahead=buffer(tiles, CANDIDATES),
            counts=buffer(tiles, CANDIDATES),
            retry_masses=buffer(tiles * (tile // segment)),
            peaks=buffer(tiles, tile // group),
            found_ids=buffer(capacity, dtype=torch.int32),
            found_logits=buffer(capacity),
        )

    @property
    def max_batch(self) -> int:
        return len(self.winner)

    @property
    def num_tiles(self) -> int:
        return self.tile_best.shape[1]

    @property
    def num_bytes(self) -> int:
        """Device memory of the buffers."""
        values = [getattr(self, field.name) for field in fields(self)]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    def grid(self, batch: int) -> tuple[int, int]:
        """Return the grid of a kernel that runs a program for each tile of each row."""
        return self.num_tiles, batch

    def segment_sizes(self) -> dict[str, int]:
        """Return the sizes of kernels that read the masses of a row's segments."""
        tiles, per_tile = triton.next_power_of_2(self.num_tiles), self.tile // self.segment
        # Noise comes for four places at a time.
        pad = max(4, tiles * per_tile)
        return {"TILES_PAD": tiles, "PAD": pad, "PER_TILE": per_tile, "SEGMENT": self.segment}

    def launch_options(self, num_warps: int) -> dict[str, object]:
        """Return the keyword arguments that every launch takes."""
        options: dict[str, object] = {"PDL": self.pdl, "num_warps": num_warps}
        return options | {"launch_pdl": True} if self.pdl else options
