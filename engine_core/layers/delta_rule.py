"""Layer with a gated delta rule in place of attention: Gated DeltaNet (Yang et al., 2025)."""

from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from tandem.engine_core.kernels.delta_rule.state import DeltaRuleShape, DeltaRuleState
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.layer_state import LayerState, StepContext
from tandem.engine_core.layers.linear import LinearWeights, Norm
from tandem.engine_core.layers.reordered_slots import Piece, reordered_slots
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig


class DeltaRule:
    """Mixing of tokens by a recurrent state of fixed size.

    It consists of a fused projection, a short convolution, the delta rule, a gated norm and an output projection.
    """

    def __init__(
        self,
        qkv: LinearWeights,
        output: LinearWeights,
        shape: DeltaRuleShape,
        kernels: KernelSet,
        conv: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        eps: float,
        is_grouped: bool = False,
    ) -> None:
        """Store the parts of a layer.

        qkv: projection to queries, keys, values and gates; conv: [channels, 1, conv_width]; a_log, dt_bias:
        [value_heads] float32; norm: [value_dim], weight of the norm of value heads; is_grouped: as in `build`.
        """
        self.qkv = qkv
        self.output = output
        self.shape = shape
        self.kernels = kernels
        self.conv = conv
        self.a_log = a_log
        self.dt_bias = dt_bias
        self.norm = norm
        self.eps = eps
        self.is_grouped = is_grouped

    @classmethod
    def build(cls, config: ModelConfig, prefix: str, context: BuildContext, is_grouped: bool = False) -> Self:
        """Allocate a layer with uninitialized weights.

        prefix: of the names of its modules, such as "model.layers.0.linear_attn."; is_grouped: whether the checkpoint
        has the projections fused and grouped by key head, as Qwen3-Next does.
        """
        shape = config.delta_rule
        assert shape is not None, "a model with recurrent layers has their sizes"
        parts = _grouped_parts(shape) if is_grouped else _parts(shape)
        order = _grouped_order(shape) if is_grouped else None
        sizes = sum(parts.values()), config.hidden_size
        projection = context.linear(f"{prefix}in_proj", *sizes, parts=parts, output_order=order)
        output = context.linear(f"{prefix}out_proj", config.hidden_size, shape.values)

        def empty(*sizes: int, dtype: torch.dtype = context.dtype) -> Tensor:
            return torch.empty(sizes, device=context.device, dtype=dtype)

        return cls(
            projection,
            output,
            shape,
            context.kernels,
            conv=empty(shape.channels, 1, shape.conv_width),
            a_log=empty(shape.value_heads, dtype=torch.float32),
            dt_bias=empty(shape.value_heads, dtype=torch.float32),
            norm=empty(shape.value_dim),
            eps=config.rms_norm_eps,
            is_grouped=is_grouped,
        )

    def __call__(
        self, update: Tensor, residual: Tensor | None, norm: Norm, step: StepContext, state: LayerState
    ) -> tuple[Tensor, Tensor]:
        """Return the next update and the residual stream, both [T, hidden].

        update, residual, norm: as in `LinearWeights.apply_normed`.
        """
        tokens, pieces, shape = step.batch.tokens, step.pieces, self.shape
        assert isinstance(state, DeltaRuleState) and tokens is not None, "a recurrent layer needs the rows of a step"
        projected, residual = self.qkv.adapted(step.batch.adapters).apply_normed(update, residual, norm)
        gates_start = shape.channels + shape.values
        gate, gates = projected[:, shape.channels : gates_start], projected[:, gates_start:]
        qkv = self.kernels.short_conv(projected, self.conv, shape, state, tokens, pieces)
        mixed = self.kernels.delta_rule(qkv, gates, self.a_log, self.dt_bias, shape, state, tokens, pieces)
        output = self.output.adapted(step.batch.adapters)
        return output.apply(self.kernels.gated_norm(mixed, gate, self.norm, self.eps, tokens)), residual

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors.

        Names are those of Hugging Face's Qwen 3.5, or Qwen3-Next.
        """
        if self.is_grouped:
            projections = reordered_slots(self.qkv, prefix, "in_proj", _grouped_parts(self.shape), _pieces(self.shape))
        else:
            projections = self.qkv.slots(prefix, "in_proj", _parts(self.shape))
        return [
            *projections,
            WeightSlot.whole(f"{prefix}conv1d.weight", self.conv),
            WeightSlot.whole(f"{prefix}A_log", self.a_log),
            WeightSlot.whole(f"{prefix}dt_bias", self.dt_bias),
            WeightSlot.whole(f"{prefix}norm.weight", self.norm),
            *self.output.slots(prefix, "out_proj"),
        ]


def _parts(shape: DeltaRuleShape) -> dict[str, int]:
    """Return the outputs of each part of the first projection."""
    heads = shape.value_heads
    return {"in_proj_qkv": shape.channels, "in_proj_z": shape.values, "in_proj_b": heads, "in_proj_a": heads}


def _grouped_parts(shape: DeltaRuleShape) -> dict[str, int]:
    """Return the outputs of each part of the first projection, as Qwen3-Next stores them."""
    return {"in_proj_qkvz": shape.channels + shape.values, "in_proj_ba": 2 * shape.value_heads}


def _grouped_order(shape: DeltaRuleShape) -> list[int]:
    """Return the index among the outputs of `_grouped_parts` of each output."""
    parts = _grouped_parts(shape)
    starts = dict(zip(parts, accumulate(parts.values(), initial=0), strict=False))
    return [starts[piece.part] + piece.start + index for piece in _pieces(shape) for index in range(piece.length)]


def _pieces(shape: DeltaRuleShape) -> list[Piece]:
    """Return the pieces of `_grouped_parts` in the order of `_parts`.

    The outputs of each key head are its query, its key, and the values and gates z of its value heads; then b and a
    likewise.
    """
    own = shape.value_heads // shape.key_heads
    sizes = {
        "in_proj_qkvz": (shape.key_dim, shape.key_dim, own * shape.value_dim, own * shape.value_dim),
        "in_proj_ba": (own, own),
    }
    pieces = []
    for part, lengths in sizes.items():
        for index, length in enumerate(lengths):
            first = sum(lengths[:index])
            pieces += [Piece(part, first + head * sum(lengths), length) for head in range(shape.key_heads)]
    return pieces
