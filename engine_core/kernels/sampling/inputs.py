"""Tables of every row's tokens and sampling parameters, and the batch to sample.

This module does not import Triton, so it can be used on every device.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.protocol.params import SAMPLING_FIELDS

INT_COLUMNS = (
    *("row", "prompt_len", "total_len", "min_tokens", "choice", "seed", "max_drafts", "prediction_len"),
    "adapter_slot",
    *(field.name for field in SAMPLING_FIELDS if field.is_integer),
)
"""Columns of the integer table. `total_len` is the maximum length of a row, `min_tokens` the number of tokens to sample
before an end token is allowed, `max_drafts` the number of drafts that a step may verify, `adapter_slot` that of the
adapter, 0 for none."""
FLOAT_COLUMNS = tuple(field.name for field in SAMPLING_FIELDS if not field.is_integer)
"""Columns of the float table, named as in `SamplingParams`."""
UPDATE_FIELDS = (
    *("upload_index", "upload_tokens", "length_rows", "lengths", "page_index", "pages"),
    *("ints", "floats", "suppressed"),
)
"""Fields of a packed step (`runtime.staging`) with table updates, except those of biases."""


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """Sampling tables on the device, indexed by row. Row 0 is padding."""

    tokens: Tensor
    """[rows, max_len] int32, token ids of every sequence; sampled ones are written here."""
    ints: Tensor
    """[rows, len(INT_COLUMNS)] int64."""
    floats: Tensor
    """[rows, len(FLOAT_COLUMNS)] float32."""
    bias: Tensor
    """[2, rows, K] int32, K a power of two: biased ids (-1 for none), and the bits of their float32 values."""
    suppressed: Tensor
    """[rows, E] int32, ids suppressed until a row has sampled its `min_tokens`, -1 for none."""
    lengths: Tensor
    """[rows] int32, number of known tokens of each row: a sampled token sets it to its position plus 1. Always 1 for
    the padding row."""

    def find_positions(self, rows: Tensor, positions: Tensor) -> None:
        """Replace negative positions by those of the rows' newest tokens.

        A row whose tokens are all computed recomputes the second to last. rows, positions: [T] int32.
        """
        row = rows.long()
        last = (self.ints[:, INT_COLUMNS.index("total_len")][row] - 1).int()
        newest = torch.where(row > 0, torch.minimum(self.lengths[row], last) - 1, 0)
        torch.where(positions < 0, newest.clamp(min=0), positions, out=positions)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The S sampled rows of a step."""

    logits: Tensor
    """[S, V] float32, bfloat16 or float16, rows contiguous; not modified."""
    rows: Tensor
    """[S] int32, each one's row index in the tables."""
    positions: Tensor
    """[S] int32, position of the logits; the sampled token takes the next one."""
    sampled: Tensor
    """[S] int32, written: the sampled ids, -1 for a row without usable logits."""
    allowed: Tensor | None = None
    """[S, ceil(V / 32)] int32, masks as in `apply_bitmask`; None allows everything."""
    needs: int = 0
    """Bits of `sampling.sampler` for the union of the rows' needs."""
    longest: int = 0
    """Number of leading token columns that contain the histories of all rows."""
    masked: Tensor | None = None
    """[S] int32, 0 if a row's mask allows everything and need not be read; None: the same for all rows."""
    publish: bool = True
    """False to write nothing but `sampled`: several tokens of a row are sampled at once, and only some will be its."""

    def published_len(self, tokens: Tensor) -> int:
        """Return the number of leading columns of the token table that the kernels may write: none without `publish`.

        As an argument it needs no further compiled kernels.
        """
        return tokens.shape[1] if self.publish else 0

    def select(self, index: Tensor) -> "SamplingBatch":
        """Return copies of some rows. index: [K] int64."""
        return replace(
            self,
            logits=self.logits[index],
            rows=self.rows[index],
            positions=self.positions[index],
            sampled=self.sampled[index],
            allowed=None if self.allowed is None else self.allowed[index],
            masked=None if self.masked is None else self.masked[index],
        )

    def part(self, first: int, last: int) -> "SamplingBatch":
        """Return rows `first` to `last` (exclusive) as views."""
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
