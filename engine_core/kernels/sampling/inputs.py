"""Tables of every row's tokens and parameters, and the batch that is sampled.

This module does not use Triton, so that it serves every device.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.protocol.params import SAMPLING_FIELDS

INT_COLUMNS = (
    *("row", "prompt_len", "total_len", "min_tokens", "choice", "seed"),
    *(field.name for field in SAMPLING_FIELDS if field.is_integer),
)
"""Columns of the integer table. `total_len` is the largest length that a row can have, `min_tokens` the number of
tokens that it samples without an end."""
FLOAT_COLUMNS = tuple(field.name for field in SAMPLING_FIELDS if not field.is_integer)
"""Columns of the float table, each named as in `SamplingParams`."""
UPDATE_FIELDS = (
    *("upload_index", "upload_tokens", "length_rows", "lengths", "page_index", "pages"),
    *("ints", "floats", "suppressed"),
)
"""Fields of a packed step (`runtime.staging`) with updates of tables, all but those of biases."""


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
    """[rows, E] int32, ids that a row suppresses before it has sampled its `min_tokens`, -1 for none."""
    lengths: Tensor
    """[rows] int32, number of tokens of each row that are known: a sampled token sets it to one past its position. That
    of the padding row is always 1."""

    def find_positions(self, rows: Tensor, positions: Tensor) -> None:
        """Replace negative positions by those of the rows' newest tokens.

        A row that has all of its tokens computes the last one but one again. rows, positions: [T] int32.
        """
        row = rows.long()
        last = (self.ints[:, INT_COLUMNS.index("total_len")][row] - 1).int()
        newest = torch.where(row > 0, torch.minimum(self.lengths[row], last) - 1, 0)
        torch.where(positions < 0, newest.clamp(min=0), positions, out=positions)


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
    allowed: Tensor | None = None
    """[S, ceil(V / 32)] int32, masks as in `apply_bitmask`; None allows everything."""
    needs: int = 0
    """Bits of `sampling.sampler` for everything that at least one of the rows needs."""
    longest: int = 0
    """Number of leading token columns that hold the histories of all rows."""
    masked: Tensor | None = None
    """[S] int32, 0 where a row's mask allows everything, so that it need not be looked at; None: no row's does."""

    def part(self, first: int, last: int) -> "SamplingBatch":
        """Return the rows from `first` to before `last`, as views."""
        rows = slice(first, last)
        if first == 0 and last >= len(self.rows):
            return self
        return replace(
            self,
            logits=self.logits[rows],
            rows=self.rows[rows],
            positions=self.positions[rows],
            sampled=self.sampled[rows],
            allowed=None if self.allowed is None else self.allowed[rows],
            masked=None if self.masked is None else self.masked[rows],
        )
