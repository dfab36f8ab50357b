"""Attention interfaces, and the inputs of a forward pass.

A planner plans the attention of a step once for all layers; each layer runs the resulting step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.delta_rule.state import TokenRows
from tandem.engine_core.kernels.lora.adapter_tokens import AdapterTokens
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention parameters of a layer.

    Layers with equal parameters but the group share one plan.
    """

    scale: float
    """Scale of the QK dot products."""
    window: int | None = None
    """Sliding window: a query at position p sees positions p - window + 1 to p. None: full causal attention."""
    softcap: float | None = None
    """Soft cap c: scaled scores s become c * tanh(s / c). None: no cap."""
    rotary: int = 0
    """Index of the layer's table among the model's rotary tables."""
    group: int = 0
    """Index of the layer's KV group, whose page table and slots it uses."""


def kinds_of_attention(layers: Iterable[LayerAttention]) -> tuple[LayerAttention, ...]:
    """Return the distinct kinds among layers, each in the first of its groups."""
    kinds: dict[LayerAttention, LayerAttention] = {}
    for layer in layers:
        kinds.setdefault(replace(layer, group=0), layer)
    return tuple(kinds.values())


@dataclass(frozen=True, slots=True)
class Span:
    """A row of a step as seen by attention, known on the host.

    It has `length` queries at positions from `start` on. Its keys are positions 0 to `start + length - 1`.
    """

    row: int
    """Row index of the page table."""
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
        """Run causal attention of one layer.

        The layer's new keys and values are already in the pool.

        query: [T, heads, head_dim]; keys, values: [slots, kv_heads, head_dim], the pool from the layer's first slot on,
        indexed by `slot_mapping`, in the query's dtype or as in `kernels.kv_dtype`; layer: one of the kinds that the
        step was planned for; scales: of the layer's keys and values, as in `kernels.kv_dtype`: the query is already
        multiplied by the key scale, and the result is multiplied by the value scale here. Return [T, heads, head_dim]
        in the query's dtype.
        """


class FusedStep(Protocol):
    """Attention of a step, with optional fusion of RoPE, KV write and output quantization."""

    def fuses_rope(self, keys: Tensor) -> bool:
        """Return True if RoPE is faster fused into attention.

        keys: of a layer, as in `AttentionStep.run`; queries have their dtype unless it is 8-bit.
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
        """Apply RoPE, write keys and values, and attend.

        Equivalent to `KernelSet.rope_and_kv_write` followed by `AttentionStep.run`. qkv: [T, heads + 2 * kv_heads,
        head_dim], heads contiguous.
        """

    def fuses_quant(self, to: ActivationFormat, head_dim: int) -> bool:
        """Return True if the output can be quantized to a format; its groups must be heads."""

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
        """Run attention and quantize the output to 8 bits, [T, heads * head_dim].

        heads: the query of `AttentionStep.run`, or with a rotation the qkv of `run_with_rope`; to: a format accepted by
        `fuses_quant`.
        """


class AttentionPlanner(Protocol):
    """Planner of attention for steps with rows of any lengths."""

    def plan(self, spans: Sequence[Span], page_tables: Sequence[PageTable]) -> AttentionStep:
        """Plan one step for all layers, without synchronizing with the device.

        spans: in the order of the step's tokens, without gaps; page_tables: of each KV group.
        """


class PromptStep(Protocol):
    """Attention of a mixed step's multi-token rows, as captured in a graph."""

    def run_into(
        self,
        out: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: LayerAttention,
        scales: Tensor | None = None,
        *,
        overlaps_decode: bool,
    ) -> None:
        """Run attention as in `AttentionStep.run` and write to `out`.

        out: shaped like query; rows beyond the planned queries are unchanged. overlaps_decode: True if the previous
        kernel is `paged_decode` with `pdl`, for other queries of the same tensor.
        """


class GraphPromptPlanner(Protocol):
    """Planner of the multi-token rows of one graph, called before each replay."""

    @property
    def step(self) -> PromptStep:
        """Step to capture.

        It reads the latest plan from memory that this planner owns.
        """

    def plan(self, spans: Sequence[Span]) -> None:
        """Write the plan of a step to the memory that the graph reads.

        Reads nothing that the previous step writes, so it may run concurrently with it. Does not synchronize with the
        device.
        """

    def gather_pages(self) -> None:
        """Gather the pages of the planned rows from the page table.

        The step's updates must be applied to it before.
        """


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of one forward pass over T tokens, on the model's device.

    The tokens of all rows are concatenated. Passed explicitly from the runtime down to the layers: layers use no
    global context.
    """

    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, position of each token in its sequence."""
    slot_mapping: Sequence[Tensor]
    """For each KV group, [T] int64: slot of each token's key and value in the pool of its layers; see `PageTable`."""
    sample_index: Tensor | None
    """[S] int64, indices of the tokens to sample from. None: all T of them."""
    attention: AttentionStep
    """The attention of this step."""
    fused: FusedStep | None = None
    """The same step if it supports fusion. None: RoPE and quantization use separate kernels."""
    rows: Tensor | None = None
    """[T] int32, row of each token; 0 for padding. None: no token is padding."""
    tokens: TokenRows | None = None
    """Rows of the tokens, which recurrent layers need."""
    has_drafts: bool = False
    """True if tokens behind the first of a row may be wrong: no earlier one may depend on them."""
    adapters: AdapterTokens | None = None
    """Adapters of the tokens; None: no token has one."""
