"""The inputs of a forward pass beside its weights, and the protocols of attention: planners, and steps they plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tandem.engine_core.kernels.page_table import PageTable


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of a layer as its model defines it. Layers with equal ones are planned once for all of them."""

    scale: float
    """Factor of the products of queries and keys."""
    window: int | None = None
    """Most positions that a query sees: at position p, those from p - window + 1 to p. None: all up to p."""
    softcap: float | None = None
    """Bound c of the scaled scores s, which become c * tanh(s / c). None: they stay as they are."""
    rotary: int = 0
    """Index of the layer's table among the model's rotary tables."""


@dataclass(frozen=True, slots=True)
class Span:
    """A row of a step as attention sees it, known on the host: `length` queries at positions from `start` on.

    Its keys are positions 0 to `start + length - 1`.
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

    def run(self, query: Tensor, keys: Tensor, values: Tensor, layer: LayerAttention) -> Tensor:
        """Attend causally in one layer, whose new keys and values are in the pool already.

        query: [T, heads, head_dim]; keys, values: [slots, kv_heads, head_dim], the pool from the layer's first slot on,
        indexed by `slot_mapping`, in the query's dtype or as in `kernels.kv_dtype`; layer: of a kind that the step was
        planned for. Returns [T, heads, head_dim] in the query's dtype.
        """


class AttentionPlanner(Protocol):
    """Prepares the attention of steps with rows of any lengths."""

    def plan(self, spans: Sequence[Span], page_table: PageTable) -> AttentionStep:
        """Plan one step for all layers, without synchronising with the device.

        spans: in the order of the step's tokens, without a gap between them.
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
        *,
        beside_decode: bool,
    ) -> None:
        """Attend as `AttentionStep.run` does and write to `out`.

        out: shaped like query; rows beyond the planned queries stay unchanged. beside_decode: whether the kernel right
        before is `paged_decode` with `pdl`, for other queries of the same tensor.
        """


class GraphPromptPlanner(Protocol):
    """Plans the rows of several tokens of one graph, anew before each replay."""

    @property
    def step(self) -> PromptStep:
        """The step that the graph captures; it reads the newest plan from memory that this planner holds."""

    def plan(self, spans: Sequence[Span]) -> None:
        """Write the plan of a step to the memory that the graph reads, without synchronising with the device."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One forward pass of T tokens, those of all rows one after the other, on the model's device.

    Passed explicitly from the runtime down to the layers: there is no ambient context.
    """

    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, position of each token in its sequence."""
    slot_mapping: Tensor
    """[T] int64, slot of each token's key and value in every layer's pool; see `PageTable`."""
    sample_index: Tensor | None
    """[S] int64, indices of the tokens that are sampled from. None: all T of them."""
    attention: AttentionStep
    """The attention of this step."""
