"""CUDA graphs of a step in a slot, the memory that they write to, and recorders."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.engine_core.attention.base import GraphPromptPlanner
from tandem.engine_core.sampling.sampler import Mode


class Graph(Protocol):
    """A recorded call, which can be enqueued again over the same memory."""

    def replay(self) -> None:
        """Enqueue all that the call enqueued, without running its Python."""


class GraphRecorder(Protocol):
    """Capture of calls as graphs that share one memory pool."""

    def record(self, fn: Callable[[], Tensor | None]) -> tuple[Graph, Tensor | None]:
        """Capture a call; return its graph and its result.

        Each replay writes the memory of the result.
        """

    def synchronize(self) -> None:
        """Wait until everything enqueued so far has run, as a capture requires."""


class CudaGraphRecorder:
    """Implement `GraphRecorder` on the current CUDA stream, with a new memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, fn: Callable[[], Tensor | None]) -> tuple[Graph, Tensor | None]:
        # `torch.cuda.graph` would collect garbage and empty caches at each of some hundred captures.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        result = fn()
        graph.capture_end()
        return graph, result

    def synchronize(self) -> None:
        torch.cuda.current_stream().synchronize()


@dataclass(frozen=True, slots=True)
class SampleBuffers:
    """Memory in which a forward pass leaves what sampling reads.

    These are P tokens, padding among them. The logits are those of all slots and graphs, because a step's are used up
    before the next forward pass begins (I1).
    """

    rows: Tensor
    """[P] int32, row of each token; 0 for padding, which is not sampled from."""
    positions: Tensor
    """[P] int32, position of each token."""
    logits: Tensor
    """[P, V]."""

    def first(self, count: int) -> "SampleBuffers":
        """Return the first places, as views."""
        return SampleBuffers(self.rows[:count], self.positions[:count], self.logits[:count])


@dataclass(frozen=True, slots=True)
class DecodeGraphs:
    """Graphs of a decode step, in which every row is a single token."""

    forward: Graph
    """The forward pass of rows that are not long."""
    logits: Tensor
    """[bucket, V], written by every forward pass."""
    sampling: dict[Mode, Graph]
    """Sampling of as many places in each mode, also after other forward passes; MASKED reads the slot's `allowed`."""
    long_context_graph: Graph
    """The forward pass that is quicker with long rows; `forward` itself where one graph serves rows of every length."""
    max_short_len: int
    """Most positions of a row that is not long."""

    def select(self, longest: int) -> Graph:
        """Return the quicker graph for a step.

        Both serve rows of every length. longest: positions of the step's longest row.
        """
        return self.forward if longest <= self.max_short_len else self.long_context_graph


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

    forward: Graph
    logits: Tensor
    """[places, V], written by `forward`; more than the samples that the step can have."""
    buffers: MixedBuffers
    """As long as the bucket: `hidden` holds the final states of all of its tokens."""
    prompts: GraphPromptPlanner
