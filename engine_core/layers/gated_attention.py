"""Self-attention whose output is multiplied by a gate, as in Qwen 3.5 (Qiu et al., 2025)."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.layers.attention import attend
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.layer_state import LayerState, PagedKV, StepContext
from tandem.engine_core.layers.linear import LinearWeights, Norm
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig


@dataclass(eq=False)
class GatedAttention:
    """Attention with a gate for each element of its output, from the same projection as the query."""

    qkv: LinearWeights
    """Outputs of each head: query and gate; then the keys of all heads, then the values."""
    output: LinearWeights
    heads: int
    kv_heads: int
    head_dim: int
    layer: LayerAttention
    kernels: KernelSet
    q_norm: RMSNorm
    k_norm: RMSNorm

    @classmethod
    def build(cls, config: ModelConfig, layer: LayerAttention, prefix: str, context: BuildContext) -> Self:
        """Allocate a layer without weights. prefix: as in `Attention.build`."""
        heads, kv_heads, head_dim, hidden = config.heads, config.kv_heads, config.head_dim, config.hidden_size
        parts = _parts(heads * head_dim, kv_heads * head_dim)
        return cls(
            context.linear(f"{prefix}qkv_proj", sum(parts.values()), hidden, config.qkv_bias, parts),
            context.linear(f"{prefix}o_proj", hidden, heads * head_dim, config.output_bias),
            heads,
            kv_heads,
            head_dim,
            layer,
            context.kernels,
            *(RMSNorm.build(head_dim, config.rms_norm_eps, context, unit_offset=True) for _ in range(2)),
        )

    def __call__(
        self, update: Tensor, residual: Tensor | None, norm: Norm, step: StepContext, state: LayerState
    ) -> tuple[Tensor, Tensor]:
        """Return the next update and the residual stream, as `Attention` does."""
        assert isinstance(state, PagedKV)
        projected, residual = self.qkv.adapted(step.batch.adapters).apply_normed(update, residual, norm)
        heads = projected.view(len(update), -1, self.head_dim)
        rotation = Rotation(
            *step.rotary[self.layer.rotary],
            step.batch.slot_mapping[self.layer.group],
            self.q_norm.weight,
            self.k_norm.weight,
            self.q_norm.eps,
        )
        given = (rotation, step.batch, state.keys, state.values, self.layer, self.kernels, state.scales)
        attended, gate = attend(heads, *given, gated=True), heads[:, 1 : 2 * self.heads : 2]
        output = self.output.adapted(step.batch.adapters)
        return output.apply(self.kernels.sigmoid_gate(attended.flatten(1), gate)), residual

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors."""
        parts = _parts(self.heads * self.head_dim, self.kv_heads * self.head_dim)
        return [
            *self.qkv.slots(prefix, "qkv_proj", parts),
            *self.output.slots(prefix, "o_proj"),
            *self.q_norm.slots(f"{prefix}q_norm"),
            *self.k_norm.slots(f"{prefix}k_norm"),
        ]


def _parts(width: int, kv_width: int) -> dict[str, int]:
    """Return the outputs of each part of the first projection of attention."""
    return {"q_proj": 2 * width, "k_proj": kv_width, "v_proj": kv_width}
