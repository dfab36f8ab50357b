"""Inputs of sampling: tables of every row's parameters, and a step's rows.

This module does not use Triton, so that it serves every device.
"""

from dataclasses import dataclass

from torch import Tensor

from tandem.protocol.params import SAMPLING_FIELDS

INT_COLUMNS = (
    *("row", "prompt_len", "choice", "seed", "seed_high"),
    *(field.name for field in SAMPLING_FIELDS if field.is_integer),
)
"""Columns of the integer table. A step brings a seed in two halves; the table holds all of it in `seed`."""
FLOAT_COLUMNS = tuple(field.name for field in SAMPLING_FIELDS if not field.is_integer)
"""Columns of the float table, each named as in `SamplingParams`."""


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """Device tables that sampling reads, indexed by row. Row 0 is padding."""

    tokens: Tensor
    """[rows, max_len] int32, ids of every sequence; sampled ones are written here."""
    ints: Tensor
    """[rows, len(INT_COLUMNS)] int64."""
    floats: Tensor
    """[rows, len(FLOAT_COLUMNS)] float32."""
    bias: Tensor
    """[2, rows, K] int32, K a power of two: biased ids (-1 for none), and the bits of their float32 values."""
    suppressed: Tensor
    """[rows, E] int32, ids that a row may suppress, -1 for none."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The S rows of a step that are sampled from."""

    logits: Tensor
    """[S, V] float32, bfloat16 or float16, rows contiguous; not modified."""
    rows: Tensor
    """[S] int32, row of each in the tables."""
    positions: Tensor
    """[S] int32, position that the logits belong to; the sampled token takes the next one."""
    sampled: Tensor
    """[S] int32, written: the sampled ids, -1 for a row without usable logits."""
    suppress: Tensor | None = None
    """[S] int32, nonzero where the row's suppressed ids may not be sampled now; None suppresses none."""
    allowed: Tensor | None = None
    """[S, ceil(V / 32)] int32, masks as in `apply_bitmask`; None allows everything."""
    needs: int = 0
    """Bits of `sampling.sampler` for everything that at least one of the rows needs."""
    longest: int = 0
    """Number of leading token columns that hold the histories of all rows."""
