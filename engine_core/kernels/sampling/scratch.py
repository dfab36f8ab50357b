"""Scratch buffers shared by the sampling kernels, and their layout."""

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

    per_thread: tokens per thread.
    """
    return max(1, min(8, block // (32 * per_thread)))


@dataclass(frozen=True, slots=True)
class SamplingScratch:
    """Buffers of the sampling kernels, for up to B rows in T tiles each.

    They take about 8 bytes per token of the vocabulary and row.

    One instance serves all steps that are enqueued in sequence on one stream, including graphs; a captured graph holds
    these addresses, so the scratch must outlive it.
    """

    vocab_size: int
    tile: int
    """Tokens per tile, a power of two. It must not depend on the batch: a row's sums would change."""
    segment: int
    """Tokens per segment, a power of two: a draw picks a segment, then one of its tokens. Changing it changes the
    sampled tokens."""
    group: int
    """Tokens per group for the lower bound of top-k, a power of two; only their maximum is used."""
    pdl: bool
    """Use programmatic dependent launch."""
    winner: Tensor
    """[B] int64, all NOTHING between kernels: running maximum of a row's ranks over its tiles."""
    arrivals: Tensor
    """[B] int32, zeros between kernels: number of finished tiles of a row."""
    tile_best: Tensor
    """[B, T] int64, best rank of each tile."""
    row_best: Tensor
    """[B] int64, best rank of each row with truncation."""
    marks: Tensor
    """[B, >= V] int32, zeros between steps: adjustments that apply to each token (see `penalties`)."""
    adjusted: Tensor
    """[B, >= V] float32, strides as in `marks`: logits after bias, penalties, suppression and mask."""
    touched: Tensor
    """[B] int32, nonzero if the row's logits are in `adjusted`."""
    masses: Tensor
    """[B, T * tile / segment] int64, mass of each segment relative to its tile's best token (see `weights`)."""
    candidates: Tensor
    """[B, CANDIDATES] int64, ranks of tokens drawn from the whole softmax; the first is DONE if the row has its
    token."""
    mass_mode: Tensor
    """[B] int32, nonzero if the mass ahead of the candidates must be computed: 1 from the model's logits, 2 from
    `adjusted`."""
    ahead: Tensor
    """[B, T, CANDIDATES] float32, mass ahead of each candidate (see `prefix_mass` for which)."""
    counts: Tensor
    """[B, T, CANDIDATES] float32, number of tokens ahead of each of these candidates."""
    retry_masses: Tensor
    """[B, T * tile / segment] float32, segment masses for resampling."""
    peaks: Tensor
    """[B, T, tile / group] float32, group maxima of rows with top-k."""
    found_ids: Tensor
    """[B, capacity] int32, ids of the tokens gathered for top-k."""
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

        capacity: maximum number of tokens per row for top-k's fast search, a power of two; others: as in the fields.
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
            mass_mode=buffer(dtype=torch.int32),
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
        """Return the grid of a kernel with one program per tile and row."""
        return self.num_tiles, batch

    def segment_sizes(self) -> dict[str, int]:
        """Return the sizes for kernels that read the masses of a row's segments."""
        tiles, per_tile = triton.next_power_of_2(self.num_tiles), self.tile // self.segment
        # Noise is generated four values at a time.
        pad = max(4, tiles * per_tile)
        return {"TILES_PAD": tiles, "PAD": pad, "PER_TILE": per_tile, "SEGMENT": self.segment}

    def launch_options(self, num_warps: int) -> dict[str, object]:
        """Return the keyword arguments that every launch takes."""
        options: dict[str, object] = {"PDL": self.pdl, "num_warps": num_warps}
        return options | {"launch_pdl": True} if self.pdl else options
