"""Launch parameters of kernels, from tile tables or by rule."""

from dataclasses import dataclass
from typing import NamedTuple


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


class Tile(NamedTuple):
    """Tile of a decode program, with its launch parameters.

    positions: read at once; warps: of the program; stages: depth of its software pipeline.
    """

    positions: int
    warps: int
    stages: int


class DecodePlan(NamedTuple):
    """Launch parameters of decode attention.

    least: fewest positions worth a program of their own; splits: fewest programs offered to a row's KV head.
    """

    tile: Tile
    least: int
    splits: int = 1
