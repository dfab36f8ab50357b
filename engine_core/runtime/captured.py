"""What a CUDA graph of a step is, for one slot."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine_core.attention.base import GraphPromptPlanner
from tandem.engine_core.runtime.tables import Mode


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
class MixedBuffers:
    """What steps with prompts leave their results in; used up before the next forward pass begins (I1), so that one
    set, as long as the largest step, is enough."""

    attended: Tensor
    """[T, heads, head_dim], of one layer; as `MixedStep.out`."""
    hidden: Tensor
    """[T, hidden]."""

    def first(self, tokens: int) -> "MixedBuffers":
        """Those of a smaller step."""
        return MixedBuffers(self.attended[:tokens], self.hidden[:tokens])


@dataclass(frozen=True, slots=True)
class CapturedMixed:
    """A step with prompts. The graph writes to its buffers for as long as it is replayed, so they are held with it."""

    forward: torch.cuda.CUDAGraph
    buffers: MixedBuffers
    """Of its shape's length: `hidden` are the final states of every place."""
    prompts: GraphPromptPlanner
