"""The inputs of a forward pass besides its weights, and attention protocols.

A planner plans the attention of a step once for all layers; the result is a step of attention that each layer runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of a layer as its model defines it.

    Layers whose attention is equal share one plan.
    """

    scale: float
    """Factor of the products of queries and keys."""
    window: int | None = None
    """Window of a query at position p: it sees positions p - window + 1 to p. None: it sees all up to p."""
    softcap: float | None = None
    """Bound c of the scaled scores s, which become c * tanh(s / c). None: they stay as they are."""
    rotary: int = 0
    """Index of the layer's table among the model's rotary tables."""


@dataclass(frozen=True, slots=True)
class Span:
    """A row of a step as attention sees it, known on the host.

    It has `length` queries at positions from `start` on. Its keys are positions 0 to `start + length - 1`.
    """

    row: int
    """Row of the page table."""
    offset: int
    """Index of its first query among the step's tokens."""
    start: int
    """Position of its first query."""
    length: int
    """Number of its queries."""


class AttentionStep(Protocol):
    """The attention of one step, planned for all layers."""

    def run(
        self, query: Tensor, keys: Tensor, values: Tensor, layer: LayerAttention, scales: Tensor | None = None
    ) -> Tensor:
        """Attend causally in one layer.

        The new keys and values of the layer are in the pool already.

        query: [T, heads, head_dim]; keys, values: [slots, kv_heads, head_dim], the pool from the layer's first slot on,
        indexed by `slot_mapping`, in the query's dtype or as in `kernels.kv_dtype`; layer: of a kind that the step was
        planned for; scales: of the layer's keys and values, as in `kernels.kv_dtype`: the query was multiplied by the
        first already, and the result is multiplied by the second here. Return [T, heads, head_dim] in the query's
        dtype.
        """


class FusedStep(Protocol):
    """The attention of a step that can do what comes before and behind it.

    It rotates the heads of its tokens and stores their keys and values, and rounds its result for the product that
    follows.
    """

    def fuses_rope(self, keys: Tensor) -> bool:
        """Return whether this step had better rotate the heads of its tokens.

        keys: of a layer, as in `AttentionStep.run`; queries have their dtype unless it is one of 8 bits.
        """

    def run_with_rope(
        self,
        qkv: Tensor,
        rotation: Rotation,
        keys: Tensor,
        values: Tensor,
        layer: LayerAttention,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Rotate, store and attend.

        It does what `KernelSet.rope_and_kv_write` and then `AttentionStep.run` do. qkv: [T, heads + 2 * kv_heads,
        head_dim], heads contiguous.
        """

    def rounds(self, to: ActivationFormat, head_dim: int) -> bool:
        """Return whether it can round to a format, whose groups have to be heads."""

    def run_quantized(
        self,
        heads: Tensor,
        rotation: Rotation | None,
        keys: Tensor,
        values: Tensor,
        layer: LayerAttention,
        scales: Tensor | None,
        to: ActivationFormat,
    ) -> QuantizedActivation:
        """Attend, and return the result in one byte, [T, heads * head_dim].

        heads: the query of `AttentionStep.run`, or with a rotation the heads of `run_with_rope`; to: a format that it
        rounds to.
        """


class AttentionPlanner(Protocol):
    """Planner of the attention of steps with rows of any lengths."""

    def plan(self, spans: Sequence[Span], page_table: PageTable) -> AttentionStep:
        """Plan one step for all layers, without synchronising with the device.

        spans: in the order of the step's tokens, without gaps between them.
        """


class PromptStep(Protocol):
    """The attention of a mixed step's rows of several tokens, as a graph captures it."""

    def run_into(
        self,
        out: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: LayerAttention,
        scales: Tensor | None = None,
        *,
        beside_decode: bool,
    ) -> None:
        """Attend as `AttentionStep.run` does and write to `out`.

        out: shaped like query; rows beyond the planned queries stay unchanged. beside_decode: True if the
        previous kernel is `paged_decode` with `pdl`, for other queries of the same tensor.
        """


class GraphPromptPlanner(Protocol):
    """Planner of the rows of several tokens in one graph, called before each replay."""

    @property
    def step(self) -> PromptStep:
        """Step that the graph captures.

        It reads the newest plan from memory that this planner holds.
        """

    def plan(self, spans: Sequence[Span]) -> None:
        """Write the plan of a step to the memory that the graph reads.

        It reads nothing that a step before writes, so it may run beside one. Does not synchronise with the device.
        """

    def take_pages(self) -> None:
        """Read the pages of the planned rows from the page table.

        The step's updates are in it by then.
        """


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of one forward pass over T tokens, on the model's device.

    The tokens of all rows follow one another. Passed explicitly from the runtime down to the layers: there is no
    ambient context.
    """

    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, position of each token in its sequence."""
    slot_mapping: Tensor
    """[T] int64, slot of each token's key and value in the pool of every layer; see `PageTable`."""
    sample_index: Tensor | None
    """[S] int64, indices of the tokens that are sampled from. None: all T of them."""
    attention: AttentionStep
    """The attention of this step."""
    fused: FusedStep | None = None
    """The same where it can do more than attend. None: other kernels rotate and round."""
