"""Launch parameters of kernels, from tile tables or by rule."""

from dataclasses import dataclass
from typing import NamedTuple

from tandem.engine_core.integers import ceil_div

INT4_STRIDE = 32
"""Divisor of the inputs of a product with weights of four bits, and of those of a group."""


@dataclass(frozen=True, slots=True)
class GemvPlan:
    """Launch parameters of a matrix-vector product.

    Each program makes `rows` x `tiles` outputs, `block_k` inputs at a time.
    """

    rows: int
    block_k: int
    tiles: int = 1
    warps: int = 4


@dataclass(frozen=True, slots=True)
class SplitKPlan:
    """Launch parameters of a split-K product.

    Its tiles are `block_n` weight rows by `block_k` columns, and `split` programs share K.
    """

    block_n: int
    block_k: int
    split: int
    stages: int = 4
    warps: int = 4


Plan = GemvPlan | SplitKPlan | None
"""None stands for the library's product."""


@dataclass(frozen=True, slots=True)
class W8A8GemmPlan:
    """Launch parameters of a product of bytes with bytes.

    Its tiles are `block_m` rows by `block_n` outputs, and `split` programs share the inputs of one.
    """

    block_m: int
    block_n: int
    split: int
    stages: int
    warps: int
    block_k: int = 128
    group_m: int = 8
    """Number of blocks of rows that follow one another over the same weights."""

    def tiles(self, rows: int, outputs: int) -> int:
        """Return the number of tiles of a product."""
        return ceil_div(rows, self.block_m) * ceil_div(outputs, self.block_n)

    def workspace(self, rows: int, outputs: int) -> tuple[int, int]:
        """Return the number of floats and of counters that a product needs."""
        if self.split == 1:
            return 0, 0
        tiles = self.tiles(rows, outputs)
        return tiles * self.split * self.block_m * self.block_n, tiles


class Tile(NamedTuple):
    """Tile of a decode program, with its launch parameters.

    positions: read at once; warps: of the program; stages: depth of its software pipeline.
    """

    positions: int
    warps: int
    stages: int


class DecodePlan(NamedTuple):
    """Launch parameters of decode attention.

    least: fewest positions worth a program of their own; splits: fewest programs offered to a row's KV head; early:
    whether programs ask for their first keys and values before the kernel before them has finished.
    """

    tile: Tile
    least: int
    splits: int = 1
    early: bool = False
