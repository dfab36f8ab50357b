"""Pre-norm decoder block, as in Llama."""

from dataclasses import dataclass

from torch import Tensor

from tandem.engine_core.layers.attention import Attention
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.layer_state import LayerState, StepContext
from tandem.engine_core.layers.mlp import GatedMLP
from tandem.engine_core.layers.moe import MixtureOfExperts
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig, layer_prefix


@dataclass(eq=False)
class PreNormBlock:
    """Pre-norm block: attention and a feed-forward network.

    A norm precedes each, and each output is added to the residual stream.
    """

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP | MixtureOfExperts
    mlp_name: str = "mlp"
    """Name of the feed-forward network in the checkpoint."""

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        index: int,
        context: BuildContext,
        mlp: MixtureOfExperts | None = None,
        mlp_name: str = "mlp",
    ) -> "PreNormBlock":
        """Allocate the block of a layer with uninitialized weights.

        mlp: None for a `GatedMLP`.
        """
        prefix = layer_prefix(index)
        return cls(
            RMSNorm.build(config.hidden_size, config.rms_norm_eps, context),
            Attention.build(config, config.attention[index], f"{prefix}self_attn.", context),
            RMSNorm.build(config.hidden_size, config.rms_norm_eps, context),
            mlp or GatedMLP.build(config, f"{prefix}{mlp_name}.", context),
            mlp_name,
        )

    def __call__(
        self,
        update: Tensor,
        residual: Tensor | None,
        step: StepContext,
        state: LayerState,
    ) -> tuple[Tensor, Tensor]:
        """Implement `decoder.Block`."""
        update, residual = self.attention(update, residual, self.attention_norm, step, state)
        return self.mlp(update, residual, self.mlp_norm, step.batch.rows, step.batch.adapters)

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors."""
        return [
            *self.attention_norm.slots(f"{prefix}input_layernorm"),
            *self.attention.slots(f"{prefix}self_attn."),
            *self.mlp_norm.slots(f"{prefix}post_attention_layernorm"),
            *self.mlp.slots(f"{prefix}{self.mlp_name}."),
        ]
