"""Log-probabilities of one token a row and of the row's most probable ones, in plain torch."""

import torch
from torch import Tensor


def logprob_lines(logits: Tensor, chosen: Tensor, top: int) -> Tensor:
    """Each row's log-softmax, computed in float32, at one token and at its `top` largest logits.

    logits: [S, V], not modified, NaN counts as -inf; chosen: [S] integer ids; top: 0 to V. Returns [S, 1 + 2 * top]
    int32: the bits of the chosen token's float32 log-probability, the bits of the largest ones in descending order,
    and their ids. Equal ones: the lowest id first. -inf where a token has no probability.
    """
    x = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    logprobs = x.log_softmax(-1).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    own = logprobs.gather(1, chosen.long().unsqueeze(1))
    # Integers that compare as (logit, lower id): no two are equal, so the order is certain.
    bits = (x + 0.0).view(torch.int32)
    rank = torch.where(bits >= 0, bits, bits ^ 0x7FFF_FFFF).long()
    ids = torch.arange(x.shape[1], device=x.device)
    best = ((rank << 32) - ids).topk(top, dim=1).indices
    values = torch.cat([own, logprobs.gather(1, best)], dim=1)
    return torch.cat([values.view(torch.int32), best.int()], dim=1)
