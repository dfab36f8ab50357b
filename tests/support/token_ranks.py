"""Ranks of tokens in plain torch, as `kernels.sampling.sort_key` defines them."""

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.sampling.sort_key import EMPTY, ID_BITS, ID_MASK


def rank_of(logits: Tensor) -> Tensor:
    """Return the rank of every token of each row, int64. logits: [S, V] float32, none of them NaN."""
    bits = (logits + 0.0).view(torch.int32)
    keys = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (keys << ID_BITS.value) | (ids ^ ID_MASK.value)


def best_of_tiles(logits: Tensor, tile: int) -> Tensor:
    """Return the best rank of each tile of each row, [S, tiles]; EMPTY where a tile has nothing but -inf."""
    ranks = torch.where(logits == -torch.inf, EMPTY.value, rank_of(logits))
    return _cut(ranks, tile, EMPTY.value).amax(-1)


def peaks_of(logits: Tensor, tile: int, group: int) -> Tensor:
    """Return the largest logit of each group of each row, [S, tiles * tile / group]."""
    return _cut(logits, tile, -torch.inf).unflatten(-1, (-1, group)).amax(-1).flatten(1)


def order_of(logits: Tensor) -> Tensor:
    """Return the ids of each row, the first in rank first."""
    return (logits + 0.0).sort(dim=1, descending=True, stable=True).indices


def _cut(values: Tensor, tile: int, rest: float) -> Tensor:
    """Cut rows into tiles, the last of which is filled up."""
    return functional.pad(values, (0, -values.shape[1] % tile), value=rest).unflatten(1, (-1, tile))
