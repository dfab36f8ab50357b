"""Log-probabilities of tokens, as used by the runtime."""

from typing import Protocol

import torch
from torch import Tensor

from tandem.engine_core.kernels.reference.sampling import logprob_records

PROMPT_SLICE = 256
"""Maximum number of prompt positions with logits in memory at once."""


RANK_SLICE = 64
"""Number of rows that are compared at once."""


def token_ranks(logits: Tensor, chosen: Tensor) -> Tensor:
    """Return the rank of a token of each row, [S] int32: 1 for the most probable one.

    Of equal logits the lowest id comes first; NaN counts as -inf. logits: [S, V]; chosen: [S] int32. No call
    synchronizes.
    """
    ids, vocabulary = chosen.long()[:, None], torch.arange(logits.shape[1], device=logits.device)
    own = logits.gather(1, ids).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ranks = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    for first in range(0, len(logits), RANK_SLICE):
        rows = slice(first, first + RANK_SLICE)
        is_before = (logits[rows] == own[rows]) & (vocabulary < ids[rows])
        is_before |= logits[rows] > own[rows]
        ranks[rows] = is_before.sum(1) + 1
    return ranks


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
