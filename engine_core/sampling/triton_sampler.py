"""Sampling with Triton kernels, entirely on the device.

It can be captured in a CUDA graph. All row data is read from device tables by row index; grids depend on shapes only,
and no call allocates, synchronizes or reads the host. All modes that support a row sample the same token for it.
Semantics, in order: `kernels.reference.sampling.sample`.
"""

from tandem.engine_core.kernels.reference.sampling import SEGMENT
from tandem.engine_core.kernels.sampling.greedy import sample_greedy
from tandem.engine_core.kernels.sampling.gumbel_draw import draw, row_best
from tandem.engine_core.kernels.sampling.inputs import SamplingBatch, SamplingTables
from tandem.engine_core.kernels.sampling.penalties import adjust, mark
from tandem.engine_core.kernels.sampling.prefix_mass import prefix_mass
from tandem.engine_core.kernels.sampling.rejection_resample import rejection_resample
from tandem.engine_core.kernels.sampling.scratch import SamplingScratch
from tandem.engine_core.kernels.sampling.sort_key import check_logits
from tandem.engine_core.sampling.sampler import Mode

TILE = 4096
"""Tokens per program."""
GROUP = 64
"""Tokens per group for the lower bound of top-k; only their maximum is used."""
CAPACITY = 2048
"""Maximum tokens per row for top-k's fast search."""
MAX_ROWS = 256
"""Maximum rows per launch, enough to fill a GPU; the rest follow in further launches. The scratch takes 8 bytes per
token of the vocabulary and such row."""


class TritonSampler:
    """Implement `Sampler` with kernels that read parameters from the tables themselves."""

    def __init__(self, tables: SamplingTables, scratch: SamplingScratch) -> None:
        """Store the tables and the kernels' scratch memory."""
        self.tables = tables
        self.scratch = scratch

    @classmethod
    def allocate(cls, tables: SamplingTables, vocab_size: int, max_rows: int, pdl: bool) -> "TritonSampler":
        """Allocate the kernels' scratch memory.

        max_rows: of a step; pdl: use programmatic dependent launch.
        """
        size = (vocab_size, min(max_rows, MAX_ROWS), TILE, SEGMENT, GROUP, CAPACITY)
        return cls(tables, SamplingScratch.allocate(*size, tables.tokens.device, pdl))

    def sample(self, batch: SamplingBatch) -> None:
        self.launch(Mode.of(batch.needs), batch)

    def launch(self, mode: Mode, batch: SamplingBatch) -> None:
        """Launch the kernels of one mode, regardless of the needs of the batch.

        Raises ValueError for logits of an unsupported dtype or layout, for another vocabulary size than the scratch's,
        for more rows than it has, and for masks in a mode that ignores them.
        """
        self._check(mode, batch)
        for first in range(0, len(batch.rows), self.scratch.max_batch):
            self._launch(mode, batch.part(first, first + self.scratch.max_batch))

    def _launch(self, mode: Mode, batch: SamplingBatch) -> None:
        if mode is Mode.GREEDY:
            sample_greedy(batch, self.tables, self.scratch)
        elif mode is Mode.UNTRUNCATED:
            row_best(batch, self.tables, self.scratch)
            draw(batch, self.tables, self.scratch, full=False)
        else:
            mark(batch, self.tables, self.scratch)
            adjust(batch, self.tables, self.scratch)
            draw(batch, self.tables, self.scratch, full=True)
            prefix_mass(batch, self.tables, self.scratch)
            rejection_resample(batch, self.tables, self.scratch)

    def _check(self, mode: Mode, batch: SamplingBatch) -> None:
        logits, count = batch.logits, len(batch.rows)
        check_logits(logits)
        vocab_size = self.scratch.vocab_size
        if logits.shape[1] != vocab_size or count != len(logits):
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} for {count} rows do not fit a vocabulary of {vocab_size}"
            )
        if batch.allowed is not None and mode is not Mode.MASKED:
            raise ValueError(f"sampling mode {mode.value} ignores masks; use {Mode.MASKED.value}")
