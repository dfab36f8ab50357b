"""One decode step as CUDA graphs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine_core.runtime.tables import Mode


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """The graphs of one slot and bucket."""

    forward: torch.cuda.CUDAGraph
    logits: Tensor
    """[bucket, V], where the forward graph leaves its result. Held, so that no other graph gets its memory."""
    sampling: dict[Mode, torch.cuda.CUDAGraph]
