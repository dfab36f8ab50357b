"""Log-probabilities of tokens, as the runtime asks for them."""

from typing import Protocol

import torch
from torch import Tensor

from tandem.engine_core.kernels.reference.sampling import logprob_records

PROMPT_SLICE = 256
"""Most prompt positions whose logits exist at once."""


class TokenScorer(Protocol):
    """Log-probabilities of one token per row and of the row's most probable tokens.

    They are looked up in the log-softmax of the row.
    """

    def run(self, logits: Tensor, chosen: Tensor, top: int, records: Tensor, index: Tensor | None = None) -> None:
        """Write one record per row, as `logprob_records` makes them.

        logits: [S, V]; chosen: [S] int32, -1 for none; top: number of most probable tokens; records: [S, 1 + 2 * top]
        int32; index: [K] int32, rows that get their record, or None for all of them.
        """


class TorchScorer:
    """Implement `TokenScorer` by the oracle, on any device."""

    def run(self, logits: Tensor, chosen: Tensor, top: int, records: Tensor, index: Tensor | None = None) -> None:
        rows = torch.arange(len(logits), device=logits.device) if index is None else index.long()
        records.index_copy_(0, rows, logprob_records(logits[rows], chosen[rows], top))
