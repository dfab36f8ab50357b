"""What a CUDA graph of a step is, for one slot."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine_core.attention.base import PromptAttention
from engine_core.runtime.tables import Mode


@dataclass(frozen=True, slots=True)
class CapturedDecode:
    """A step of single tokens. What the graphs leave is held, so that no other graph gets its memory."""

    forward: torch.cuda.CUDAGraph
    logits: Tensor
    """[bucket, V]."""
    sampling: dict[Mode, torch.cuda.CUDAGraph]
    masked: torch.cuda.CUDAGraph
    """Sampling with everything, under the masks in the slot's `allowed`."""


@dataclass(frozen=True, slots=True)
class CapturedMixed:
    """A step with prompts."""

    forward: torch.cuda.CUDAGraph
    hidden: Tensor
    """[T, hidden], final states of every place of its shape."""
    prompts: PromptAttention
