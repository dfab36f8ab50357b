"""Launch parameters of kernels, from tile tables or rules."""

from dataclasses import dataclass
from typing import NamedTuple

from tandem.engine_core.integers import ceil_div

INT4_STRIDE = 32
"""Required divisor of the inputs and of the group size of an int4 matmul."""

INT4_BLOCK = 128
"""Inputs of the largest block of the layout of int4 weights."""

NARROW_BLOCK = 8
"""Pairs of a block of `moe.int4_narrow_gemm`; blocks of other matmuls have at least 16 rows."""


@dataclass(frozen=True, slots=True)
class GemvPlan:
    """Launch parameters of a GEMV.

    Each program computes `rows` x `tiles` outputs, `block_k` inputs at a time.
    """

    rows: int
    block_k: int
    tiles: int = 1
    warps: int = 4


@dataclass(frozen=True, slots=True)
class SplitKPlan:
    """Launch parameters of a split-K GEMM.

    Its tiles are `block_n` weight rows by `block_k` columns, and `split` programs share K.
    """

    block_n: int
    block_k: int
    split: int
    stages: int = 4
    warps: int = 4


Plan = GemvPlan | SplitKPlan | None
"""None means the library's matmul."""


@dataclass(frozen=True, slots=True)
class W8A8GemmPlan:
    """Launch parameters of a W8A8 GEMM.

    Its tiles are `block_m` rows by `block_n` outputs, and `split` programs share the inputs of one.
    """

    block_m: int
    block_n: int
    split: int
    stages: int
    warps: int
    block_k: int = 128
    group_m: int = 8
    """Number of row blocks processed consecutively with the same weights."""

    def tiles(self, rows: int, outputs: int) -> int:
        """Return the number of output tiles."""
        return ceil_div(rows, self.block_m) * ceil_div(outputs, self.block_n)

    def workspace(self, rows: int, outputs: int) -> tuple[int, int]:
        """Return the required number of floats and of counters."""
        if self.split == 1:
            return 0, 0
        tiles = self.tiles(rows, outputs)
        return tiles * self.split * self.block_m * self.block_n, tiles


@dataclass(frozen=True, slots=True)
class RouterPlan:
    """Launch parameters of a router's matmul.

    Its tiles are `block_m` tokens by `block_e` experts, and `split` programs share the inputs of one, `block_k` at a
    time.
    """

    block_m: int
    block_e: int
    block_k: int
    split: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """Launch parameters of a grouped GEMM.

    Its tiles are `block_m` pairs of one expert by `block_n` rows of its weight, or of both halves of a gated one.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int


ExpertPlan = GemvPlan | GroupedPlan
"""A GEMV for each pair of a token and an expert, or a GEMM over blocks of pairs."""


class Tile(NamedTuple):
    """Tile of a decode program, with its launch parameters.

    positions: per block; warps: per program; stages: of the software pipeline.
    """

    positions: int
    warps: int
    stages: int


class DecodePlan(NamedTuple):
    """Launch parameters of decode attention.

    least: minimum positions per split; splits: minimum number of splits of a row and KV head; early: whether programs
    load their first keys and values before the preceding kernel has finished.
    """

    tile: Tile
    least: int
    splits: int = 1
    early: bool = False
