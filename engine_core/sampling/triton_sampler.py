"""Sampling by Triton kernels on the device alone.

A CUDA graph can hold it. Everything about a row is read from device tables by row index; grids depend on the shapes
only, and no call allocates, synchronises or reads the host. The modes give one row the same token wherever more than
one of them applies. Semantics, in order: `kernels.reference.sampling.sample`.
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
"""Tokens that a program holds."""
GROUP = 64
"""Tokens of which only the largest counts when top-k looks for its bound."""
CAPACITY = 2048
"""Tokens of a row among which the last one of top-k is searched fast."""
MAX_ROWS = 256
"""Most rows that are sampled at once, which are enough to fill a GPU; others follow in further launches. The scratch
takes 8 bytes for each token of the vocabulary and such a row."""


class TritonSampler:
    """Implement `Sampler` by kernels that read parameters from the tables themselves."""

    def __init__(self, tables: SamplingTables, scratch: SamplingScratch) -> None:
        """Keep the tables and the kernels' scratch memory."""
        self.tables = tables
        self.scratch = scratch

    @classmethod
    def allocate(cls, tables: SamplingTables, vocab_size: int, max_rows: int, pdl: bool) -> "TritonSampler":
        """Allocate the kernels' scratch memory.

        max_rows: of a step; pdl: chain the kernels by programmatic dependent launch.
        """
        size = (vocab_size, min(max_rows, MAX_ROWS), TILE, SEGMENT, GROUP, CAPACITY)
        return cls(tables, SamplingScratch.allocate(*size, tables.tokens.device, pdl))

    def sample(self, batch: SamplingBatch) -> None:
        self.launch(Mode.of(batch.needs), batch)

    def launch(self, mode: Mode, batch: SamplingBatch) -> None:
        """Launch the kernels of one mode, regardless of the needs of the batch.

        Raises ValueError for logits of another kind or vocabulary than the scratch is for, or of another number of
        rows, and for masks that the mode would ignore.
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
