"""Log-probabilities of tokens, as used by the runtime."""

from typing import Protocol

import torch
from torch import Tensor

from tandem.engine_core.kernels.reference.sampling import logprob_records

PROMPT_SLICE = 256
"""Maximum number of prompt positions with logits in memory at once."""


class TokenScorer(Protocol):
    """Log-probabilities of one token per row and of the row's top tokens.

    They are taken from the log-softmax of the row.
    """

    def run(self, logits: Tensor, chosen: Tensor, top: int, records: Tensor, index: Tensor | None = None) -> None:
        """Write one record per row, as in `logprob_records`.

        logits: [S, V]; chosen: [S] int32, -1 for none; top: number of top tokens; records: [S, 1 + 2 * top] int32;
        index: [K] int32, rows whose records are written, or None for all.
        """


class TorchScorer:
    """Implement `TokenScorer` with the oracle, on any device."""

    def run(self, logits: Tensor, chosen: Tensor, top: int, records: Tensor, index: Tensor | None = None) -> None:
        rows = torch.arange(len(logits), device=logits.device) if index is None else index.long()
        records.index_copy_(0, rows, logprob_records(logits[rows], chosen[rows], top))
