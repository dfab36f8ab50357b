"""CUDA graphs of one step and slot, with the memory that they write to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine_core.attention.base import GraphPromptPlanner
from tandem.engine_core.sampling.sampler import Mode


@dataclass(frozen=True, slots=True)
class DecodeGraphs:
    """Graphs of a decode step, in which every row is a single token.

    Their outputs are held, so that no other graph gets that memory.
    """

    forward: torch.cuda.CUDAGraph
    logits: Tensor
    """[bucket, V], written by `forward`."""
    sampling: dict[Mode, torch.cuda.CUDAGraph]
    """One graph per mode; that of MASKED reads the slot's `allowed`."""


@dataclass(frozen=True, slots=True)
class MixedBuffers:
    """Outputs of steps with prompts, as long as the largest step.

    One set is enough, because a step's outputs are used up before the next forward pass begins (I1).
    """

    attended: Tensor
    """[T, heads, head_dim], attention output of one layer; as `MixedStep.out`."""
    hidden: Tensor
    """[T, hidden]."""

    def first(self, tokens: int) -> "MixedBuffers":
        """Return the buffers of a smaller step, as views."""
        return MixedBuffers(self.attended[:tokens], self.hidden[:tokens])


@dataclass(frozen=True, slots=True)
class MixedGraph:
    """Graph of a step with prompts, held together with the buffers that it writes to."""

    forward: torch.cuda.CUDAGraph
    buffers: MixedBuffers
    """As long as the bucket: `hidden` holds the final states of all of its tokens."""
    prompts: GraphPromptPlanner
