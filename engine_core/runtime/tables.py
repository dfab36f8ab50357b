"""Device memory that outlives a step.

It holds the tokens, pages and sampling parameters of every row. All token values are kept here: prompts and samples are
written, every forward gathers. So the newest token, which exists only on the device, needs no special case. Row 0 and
page 0 are padding.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.sampling.inputs import FLOAT_COLUMNS, INT_COLUMNS, SamplingBatch, SamplingTables
from tandem.engine_core.kv_cache.storage import KVStorage
from tandem.engine_core.page_counts import PageColumns
from tandem.engine_core.plan import NewSequence
from tandem.engine_core.runtime.captured import Graph
from tandem.engine_core.runtime.staging import MAX_SUPPRESSED, Packed
from tandem.engine_core.sampling.sampler import MASKED, SUPPRESSES, needs_of
from tandem.protocol.params import MAX_LOGIT_BIAS


class DeviceTables:
    """Tables on the device, indexed by row.

    Launches with updates write them in stream order; every forward pass and sampling reads them.
    """

    def __init__(
        self, pages: Tensor, columns: tuple[PageColumns, ...], sampling: SamplingTables, predictions: Tensor
    ) -> None:
        self.pages = pages
        """Page tables of all KV groups, [rows, columns] int32."""
        self.columns = columns
        """Columns of each group."""
        self.sampling = sampling
        """Tables that sampling reads, the tokens among them."""
        self.predictions = predictions
        """[rows, max_prediction] int32: text that each row's request predicts, `prediction_len` tokens of it."""
        self.needs = np.zeros(len(sampling.tokens), dtype=np.uint8)
        """[rows] on the host: bits of the sampling features that each row needs, as returned by `needs_of`."""
        self.free_lens = np.zeros(len(sampling.tokens), dtype=np.int32)
        """[rows] on the host: length of each row from which it suppresses no ids."""
        self.needs_logprobs = np.zeros(len(sampling.tokens), dtype=bool)
        """[rows] on the host: True for rows with log-probabilities."""
        self.biased = np.zeros(len(sampling.tokens), dtype=bool)
        """[rows] on the host: True for rows with biased ids other than -1 on the device."""

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        max_len: int,
        columns: tuple[PageColumns, ...],
        device: torch.device,
        max_prediction: int = 0,
    ) -> "DeviceTables":
        """Allocate zeroed tables for `max_rows` rows and the padding row.

        columns: of each KV group's page table; max_prediction: tokens of the prediction of a row.
        """
        rows = max_rows + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        sampling = SamplingTables(
            tokens=zeros(rows, max_len),
            ints=zeros(rows, len(INT_COLUMNS), dtype=torch.int64),
            floats=zeros(rows, len(FLOAT_COLUMNS), dtype=torch.float32),
            bias=torch.stack([zeros(rows, MAX_LOGIT_BIAS) - 1, zeros(rows, MAX_LOGIT_BIAS)]),
            suppressed=zeros(rows, MAX_SUPPRESSED),
            lengths=torch.ones(rows, dtype=torch.int32, device=device),
        )
        return cls(zeros(rows, sum(own.count for own in columns)), columns, sampling, zeros(rows, max_prediction))

    def page_tables(self, kv: KVStorage) -> tuple[PageTable, ...]:
        """Return the page table of each KV group, of pages of a pool."""
        return tuple(
            kv.page_table(self.pages[:, own.first : own.first + own.count], group, own.ring)
            for group, own in enumerate(self.columns)
        )

    @property
    def tokens(self) -> Tensor:
        """Token table, [rows, max_len] int32."""
        return self.sampling.tokens

    def note(self, admitted: tuple[NewSequence, ...]) -> None:
        """Record on the host which sampling features the admitted rows need."""
        for a in admitted:
            self.needs[a.row] = needs_of(a.params)
            self.free_lens[a.row] = a.prompt_len + a.params.min_tokens
            self.needs_logprobs[a.row] = a.logprobs

    def apply(self, inputs: Tensor, packed: Packed, graph: Graph | None = None) -> None:
        """Write a step's updates into the tables, from its packed inputs on the device.

        Tokens and pages are written without an allocation (I7). graph: writes all of them but biases and predictions in
        one launch, by `update_tables`: the step starts the sooner. None: torch writes them.
        """
        if graph is None:
            self._write(inputs, packed)
        elif packed.has_updates:
            graph.replay()
        if "ints" in packed.fields:
            admitted = packed.read("ints").view(np.int64)[:: len(INT_COLUMNS)]
            if "bias_index" in packed.fields or self.biased[admitted].any():
                self._write_biases(inputs, packed, admitted)
            if "predictions" in packed.fields:
                self._write_predictions(inputs, packed)

    def _write(self, inputs: Tensor, packed: Packed) -> None:
        if "upload_index" in packed.fields:
            _scatter(self.tokens, wide_field(inputs, packed, "upload_index"), field(inputs, packed, "upload_tokens"))
            _scatter(self.sampling.lengths, wide_field(inputs, packed, "length_rows"), field(inputs, packed, "lengths"))
        if "page_index" in packed.fields:
            _scatter(self.pages, wide_field(inputs, packed, "page_index"), field(inputs, packed, "pages"))
        if "ints" in packed.fields:
            table, ints = self.sampling, wide_field(inputs, packed, "ints").view(-1, len(INT_COLUMNS))
            rows, floats = ints[:, 0], field(inputs, packed, "floats").view(torch.float32)
            table.ints.index_copy_(0, rows, ints)
            table.floats.index_copy_(0, rows, floats.view(-1, len(FLOAT_COLUMNS)))
            table.suppressed.index_copy_(0, rows, field(inputs, packed, "suppressed").view(-1, MAX_SUPPRESSED))

    def _write_biases(self, inputs: Tensor, packed: Packed, admitted: NDArray[np.int64]) -> None:
        """Replace the biases of admitted rows, [A], by those that a step uploads."""
        ids, values = self.sampling.bias[0], self.sampling.bias[1]
        ids.index_fill_(0, wide_field(inputs, packed, "ints")[:: len(INT_COLUMNS)], -1)
        self.biased[admitted] = False
        if "bias_index" in packed.fields:
            # Before the writes: one for which there is too little memory may leave a part, which the row's next
            # sequence has to clear.
            self.biased[packed.read("bias_index") // MAX_LOGIT_BIAS] = True
            index = field(inputs, packed, "bias_index").long()
            _scatter(ids, index, field(inputs, packed, "bias_ids"))
            _scatter(values, index, field(inputs, packed, "biases"))

    def _write_predictions(self, inputs: Tensor, packed: Packed) -> None:
        """Write the predictions of the admitted rows that have one; the others have a `prediction_len` of 0."""
        ints = packed.read("ints").view(np.int64).reshape(-1, len(INT_COLUMNS))
        lengths = ints[:, INT_COLUMNS.index("prediction_len")].tolist()
        tokens, start = field(inputs, packed, "predictions"), 0
        for row, length in zip(ints[:, 0].tolist(), lengths, strict=True):
            if length:
                self.predictions[row, :length].copy_(tokens[start : start + length])
                start += length

    def sampling_batch(
        self, logits: Tensor, inputs: Tensor, packed: Packed, allowed: Tensor | None, sampled: Tensor
    ) -> SamplingBatch:
        """Return the sampling inputs of the S rows of a step that sample.

        The forward pass has replaced negative positions. logits: [S, V]; allowed: [S, words] int32; sampled: [S] int32,
        to be written.
        """
        positions = field(inputs, packed, "positions")
        if "sample_index" in packed.fields:
            positions = positions[field(inputs, packed, "sample_index")[: len(logits)].long()]
        return SamplingBatch(
            logits=logits,
            rows=field(inputs, packed, "sample_rows"),
            positions=positions[: len(logits)],
            sampled=sampled,
            allowed=allowed,
            masked=None if allowed is None else field(inputs, packed, "mask_index"),
            needs=self.sampling_needs(packed, allowed is not None),
            longest=packed.longest,
        )

    def sampling_needs(self, packed: Packed, masked: bool) -> int:
        """Return the bits of everything that sampling the rows of a step needs."""
        rows = packed.sample_rows
        needs = int(np.bitwise_or.reduce(self.needs[rows]))
        if needs & SUPPRESSES:
            # A row that has its `min_tokens` needs this no more.
            self.needs[rows[packed.sample_positions + 1 >= self.free_lens[rows]]] &= 0xFF ^ SUPPRESSES
            needs = int(np.bitwise_or.reduce(self.needs[rows]))
        return needs | MASKED * masked


def field(inputs: Tensor, packed: Packed, name: str) -> Tensor:
    """Return a view of one field of a packed step, int32."""
    offset, length = packed.fields[name]
    return inputs[offset : offset + length]


def wide_field(inputs: Tensor, packed: Packed, name: str) -> Tensor:
    """Return a view of one field of 64-bit integers, int64."""
    return field(inputs, packed, name).view(torch.int64)


def _scatter(table: Tensor, index: Tensor, values: Tensor) -> None:
    table.view(-1).index_copy_(0, index, values)
