"""Decoder blocks with norms before and after each sublayer, as in Gemma."""

from dataclasses import dataclass

from torch import Tensor

from tandem.engine_core.layers.attention import Attention
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.layer_state import LayerState, StepContext
from tandem.engine_core.layers.linear import Norm
from tandem.engine_core.layers.mlp import GatedMLP
from tandem.engine_core.layers.norm import RMSNorm, SandwichNorm
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig, layer_prefix


@dataclass(eq=False)
class SandwichBlock:
    """Block with norms before and after attention and the feed-forward network.

    Outputs are normalized before they are added to the residual stream.
    """

    attention_norm: Norm
    """Norm of the stream before attention, fused with the output norm of the previous block."""
    attention: Attention
    mlp_norm: SandwichNorm
    """Norm of the stream before the feed-forward network, fused with the output norm of attention."""
    mlp: GatedMLP
    norms: dict[str, RMSNorm]
    """The four norms by their names in the checkpoint."""

    @classmethod
    def build(
        cls, config: ModelConfig, index: int, before: "SandwichBlock | None", context: BuildContext
    ) -> "SandwichBlock":
        """Allocate the block of a layer with uninitialized weights.

        before: the previous block, None for the first.
        """
        prefix = layer_prefix(index)
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        norms = {
            name: RMSNorm.build(config.hidden_size, config.rms_norm_eps, context, unit_offset=True) for name in names
        }
        first = norms["input"]
        return cls(
            first if before is None else SandwichNorm(before.norms["post_feedforward"], first),
            Attention.build(config, config.attention[index], f"{prefix}self_attn.", context, unit_offset=True),
            SandwichNorm(norms["post_attention"], norms["pre_feedforward"]),
            GatedMLP.build(config, f"{prefix}mlp.", context),
            norms,
        )

    def __call__(
        self,
        update: Tensor,
        residual: Tensor | None,
        step: StepContext,
        state: LayerState,
    ) -> tuple[Tensor, Tensor]:
        """Implement `decoder.Block`.

        The update is not normalized yet, on entry and on return.
        """
        update, residual = self.attention(update, residual, self.attention_norm, step, state)
        return self.mlp(update, residual, self.mlp_norm, adapters=step.batch.adapters)

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors."""
        norms = [slot for name, norm in self.norms.items() for slot in norm.slots(f"{prefix}{name}_layernorm")]
        return [*norms, *self.attention.slots(f"{prefix}self_attn."), *self.mlp.slots(f"{prefix}mlp.")]


def build_sandwich(config: ModelConfig, context: BuildContext) -> tuple[list[SandwichBlock], SandwichNorm]:
    """Allocate the blocks of a decoder and the final norm, with uninitialized weights."""
    blocks: list[SandwichBlock] = []
    for index in range(config.layers):
        blocks.append(SandwichBlock.build(config, index, blocks[-1] if blocks else None, context))
    final = RMSNorm.build(config.hidden_size, config.rms_norm_eps, context, unit_offset=True)
    return blocks, SandwichNorm(blocks[-1].norms["post_feedforward"], final)
