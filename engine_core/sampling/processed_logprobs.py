"""Log-probabilities of the distribution that tokens are drawn from, instead of the model's own."""

import torch
from torch import Tensor

from tandem.engine_core.kernels.reference.sampling import process_logits
from tandem.engine_core.kernels.sampling.inputs import SamplingBatch, SamplingTables
from tandem.engine_core.sampling.scorer import TokenScorer
from tandem.engine_core.sampling.torch_sampler import gather

SLICE = 32
"""Maximum number of rows with processed logits in memory at once."""


class ProcessedLogprobs:
    """Score sampled tokens by their logits after bias, penalties, masks, temperature and truncation.

    Plain torch on any device: no call synchronizes, and only rows with log-probabilities are processed.
    """

    def __init__(self, tables: SamplingTables, scorer: TokenScorer) -> None:
        self.tables = tables
        self.scorer = scorer

    def run(self, batch: SamplingBatch, top: int, records: Tensor, index: Tensor) -> None:
        """Write the records of some rows of a batch that was sampled, as in `TokenScorer.run`.

        records: [S, 1 + 2 * top] int32; index: [K] int32.
        """
        for first in range(0, len(index), SLICE):
            rows = index[first : first + SLICE].long()
            part = batch.select(rows)
            logits = process_logits(part.logits, gather(self.tables, part), part.allowed)
            scored = torch.empty(len(rows), records.shape[1], dtype=records.dtype, device=records.device)
            self.scorer.run(logits, part.sampled, top, scored)
            records.index_copy_(0, rows, scored)
