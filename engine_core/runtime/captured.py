"""CUDA graphs of steps, their output buffers, and graph recorders."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.engine_core.attention.base import GraphPromptPlanner, Span
from tandem.engine_core.sampling.sampler import Mode


class Graph(Protocol):
    """A recorded call that can be replayed over the same memory."""

    def replay(self) -> None:
        """Enqueue the recorded kernels, without running Python."""


class GraphRecorder(Protocol):
    """Captures calls as graphs that share one memory pool."""

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
    """Outputs of a forward pass that sampling reads.

    There are P samples, including padding. The logits are shared by all slots and graphs, because a step's logits are
    consumed before the next forward pass begins (I1).
    """

    rows: Tensor
    """[P] int32, row of each token; 0 for padding, which is not sampled from."""
    positions: Tensor
    """[P] int32, position of each token."""
    logits: Tensor
    """[P, V]."""

    def first(self, count: int) -> "SampleBuffers":
        """Return views of the first `count` samples."""
        return SampleBuffers(self.rows[:count], self.positions[:count], self.logits[:count])


@dataclass(frozen=True, slots=True)
class DecodeGraphs:
    """Graphs of a decode step, with a single token per row."""

    forward: Graph
    """Forward pass for rows of at most `max_short_len` positions."""
    logits: Tensor
    """[bucket, V], written by every forward pass."""
    sampling: dict[Mode, Graph]
    """Sampling of this number of rows by mode, also used after other forward passes; MASKED reads the slot's
    `allowed`."""
    long_context_graph: Graph
    """Forward pass that is faster with long rows; the same object as `forward` if one graph serves all lengths."""
    max_short_len: int
    """Largest number of positions of a row for which `forward` is faster."""
    adapted: Graph | None = None
    """Forward pass with the adapters of the rows; None: not captured."""

    def select(self, longest: int, has_adapters: bool = False) -> Graph:
        """Return the faster graph for a step.

        Both are correct for rows of every length. longest: number of positions of the step's longest row.
        """
        if has_adapters:
            return with_adapters(self)
        return self.forward if longest <= self.max_short_len else self.long_context_graph


@dataclass(frozen=True, slots=True)
class DraftGraphs:
    """Graphs of the passes of a draft model, for a number of rows."""

    first: Graph
    """Pass before the first draft of a step."""
    following: Graph
    """Pass before each other draft."""
    sampling: dict[Mode, Graph]
    """Sampling of a draft of each row, and its write into the token table."""

    def replay(self, num_drafts: int, needs: int) -> None:
        """Enqueue the passes of a step. needs: bits of all rows, without masks: rows with masks have no drafts."""
        sampling = self.sampling[Mode.of(needs)]
        for number in range(num_drafts):
            (self.following if number else self.first).replay()
            sampling.replay()


@dataclass(frozen=True, slots=True)
class DraftPromptGraph:
    """Graph of a draft model's pass over known tokens, and its inputs, which all such graphs share."""

    forward: Graph
    rows: Tensor
    """[T] int32, row of each token."""
    positions: Tensor
    """[T] int32, position of each token."""
    prompts: GraphPromptPlanner

    def replay(self, spans: Sequence[Span], rows: Tensor, positions: Tensor) -> None:
        """Enqueue the pass.

        spans: of at most T tokens, which are those of `rows` and `positions`, int32.
        """
        self.prompts.plan(spans)
        count = len(rows)
        for own, given in ((self.rows, rows), (self.positions, positions)):
            own[:count].copy_(given)
            own[count:].zero_()
        self.prompts.gather_pages()
        self.forward.replay()


@dataclass(frozen=True, slots=True)
class VerifyGraphs:
    """Graphs of a step that verifies drafts."""

    forward: Graph
    """Forward pass, and before it the proposal of the drafts if no graph of `drafts` does that."""
    logits: Tensor
    """[rows * (1 + drafts), V], written by `forward`."""
    sampling: dict[Mode, Graph]
    """Sampling of these positions by mode, and acceptance of the drafts."""
    adapted: Graph | None = None
    """`forward` with the adapters of the rows; None: not captured."""
    drafts: DraftGraphs | None = None
    """Passes of the draft model before; None without one."""

    def select(self, has_adapters: bool) -> Graph:
        """Return the graph of a step."""
        return with_adapters(self) if has_adapters else self.forward


class Growth(NamedTuple):
    """What some graphs took of a start."""

    seconds: float = 0.0
    bytes: int = 0
    """Memory of the device."""


NO_GROWTH = Growth()


@dataclass(frozen=True, slots=True)
class MixedBuffers:
    """Outputs of steps with prompts, as long as the largest step.

    One set is enough, because a step's outputs are consumed before the next forward pass begins (I1).
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
    """Graph of a step with prompts, and the buffers that it writes to."""

    forward: Graph
    logits: Tensor
    """[P, V], written by `forward`; P is the sample capacity, which may exceed the number of samples of a step."""
    buffers: MixedBuffers
    """Of the bucket's size; `hidden` holds the final states of all its tokens."""
    prompts: GraphPromptPlanner
    adapted: Graph | None = None
    """`forward` with the adapters of the rows; None: not captured."""

    def select(self, has_adapters: bool) -> Graph:
        """Return the graph of a step."""
        return with_adapters(self) if has_adapters else self.forward


def with_adapters(graphs: DecodeGraphs | VerifyGraphs | MixedGraph) -> Graph:
    """Return the forward pass with adapters."""
    assert graphs.adapted is not None, "no graph of this size has adapters"
    return graphs.adapted
