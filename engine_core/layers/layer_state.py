"""What a layer gets in each step in addition to its input: the step, and the memory that the layer keeps."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch
from tandem.engine_core.kernels.delta_rule.state import DeltaRuleState, Pieces


@dataclass(frozen=True, slots=True)
class StepContext:
    """Inputs of a step that all layers share."""

    batch: ForwardBatch
    rotary: Sequence[tuple[Tensor, Tensor]]
    """Cosines and sines of the batch's positions, from each of the model's rotary tables."""
    query_scales: Tensor | None = None
    """Factors of the queries, [T, 1, 1] in the model's dtype; None: they are not scaled."""
    pieces: Pieces | None = None
    """The tokens as the kernels of recurrent layers take them, if the model has such layers and kernels."""


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of a layer in the pages of its group, written at `ForwardBatch.slot_mapping`."""

    keys: Tensor
    """[slots, kv_heads, head_dim], the pool from the layer's first slot on."""
    values: Tensor
    """Shaped like the keys."""
    scales: Tensor | None
    """Scales of an 8-bit pool, as in `kernels.kv_dtype`, else None."""


LayerState = PagedKV | DeltaRuleState
"""Memory that a layer keeps from step to step."""
