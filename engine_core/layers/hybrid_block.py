"""Pre-norm decoder block of a hybrid: attention with an output gate, or a gated delta rule in place of it."""

from dataclasses import dataclass

from torch import Tensor

from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.delta_rule import DeltaRule
from tandem.engine_core.layers.gated_attention import GatedAttention
from tandem.engine_core.layers.layer_state import LayerState, StepContext
from tandem.engine_core.layers.mlp import GatedMLP
from tandem.engine_core.layers.moe import MixtureOfExperts
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig, layer_prefix


@dataclass(eq=False)
class HybridBlock:
    """Pre-norm block: attention or a delta rule, and a feed-forward network."""

    attention_norm: RMSNorm
    attention: GatedAttention | DeltaRule
    mlp_norm: RMSNorm
    mlp: GatedMLP | MixtureOfExperts

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        index: int,
        context: BuildContext,
        mlp: MixtureOfExperts | None = None,
        is_grouped: bool = False,
    ) -> "HybridBlock":
        """Allocate the block of a layer with uninitialized weights.

        mlp: None for a `GatedMLP`; is_grouped: as in `DeltaRule.build`.
        """
        prefix = layer_prefix(index)
        norms = [RMSNorm.build(config.hidden_size, config.rms_norm_eps, context, unit_offset=True) for _ in range(2)]
        attention: GatedAttention | DeltaRule
        if index in config.recurrent_layers:
            attention = DeltaRule.build(config, f"{prefix}linear_attn.", context, is_grouped)
        else:
            attention = GatedAttention.build(config, config.attention[index], f"{prefix}self_attn.", context)
        return cls(norms[0], attention, norms[1], mlp or GatedMLP.build(config, f"{prefix}mlp.", context))

    def __call__(
        self, update: Tensor, residual: Tensor | None, step: StepContext, state: LayerState
    ) -> tuple[Tensor, Tensor]:
        """Implement `decoder.Block`."""
        update, residual = self.attention(update, residual, self.attention_norm, step, state)
        return self.mlp(update, residual, self.mlp_norm, step.batch.rows, step.batch.adapters)

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors."""
        name = "linear_attn." if isinstance(self.attention, DeltaRule) else "self_attn."
        return [
            *self.attention_norm.slots(f"{prefix}input_layernorm"),
            *self.attention.slots(f"{prefix}{name}"),
            *self.mlp_norm.slots(f"{prefix}post_attention_layernorm"),
            *self.mlp.slots(f"{prefix}mlp."),
        ]
