"""Self-attention layer with grouped query heads."""

from typing import Self

from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch, LayerAttention
from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.kernels.reference.layer import without_gates
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.layer_state import LayerState, PagedKV, StepContext
from tandem.engine_core.layers.linear import LinearWeights, Norm
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig


def attend(
    qkv: Tensor,
    rotation: Rotation,
    batch: ForwardBatch,
    keys: Tensor,
    values: Tensor,
    layer: LayerAttention,
    kernels: KernelSet,
    scales: Tensor | None,
    gated: bool = False,
) -> Tensor:
    """Apply RoPE, write keys and values, and attend.

    Arguments are those of `attend_and_project`; gated: whether a gate follows each query in qkv. Returns [T, heads,
    head_dim].
    """
    cos, sin, slots, q_norm, k_norm, eps = rotation
    if batch.fused is not None and batch.fused.fuses_rope(keys):
        qkv = without_gates(qkv, keys.shape[1]) if gated else qkv
        return batch.fused.run_with_rope(qkv, rotation, keys, values, layer, scales)
    norms = (q_norm, k_norm, eps)
    heads = kernels.rope_and_kv_write(qkv, cos, sin, slots, keys, values, *norms, scales, batch.has_drafts, gated)
    return batch.attention.run(heads, keys, values, layer, scales)


def attend_and_project(
    qkv: Tensor,
    rotation: Rotation,
    batch: ForwardBatch,
    keys: Tensor,
    values: Tensor,
    layer: LayerAttention,
    output: LinearWeights,
    kernels: KernelSet,
    scales: Tensor | None,
) -> Tensor:
    """Apply RoPE, write keys and values, attend, and apply the output projection.

    Some steps fuse all but the last in one or two kernels, including the quantization of the projection's input. qkv:
    [T, heads + 2 * kv_heads, head_dim]; keys, values, scales: as in `PagedKV`. Returns [T, hidden].
    """
    tokens, _, head_dim = qkv.shape
    heads, fused, (cos, sin, slots, q_norm, k_norm, eps) = qkv, batch.fused, rotation
    fuses_rope = fused is not None and fused.fuses_rope(keys)
    if not fuses_rope:
        norms = (q_norm, k_norm, eps)
        heads = kernels.rope_and_kv_write(qkv, cos, sin, slots, keys, values, *norms, scales, batch.has_drafts, False)
    output = output.adapted(batch.adapters)
    to = None if fused is None else output.input_format(tokens)
    if fused is not None and to is not None and fused.fuses_quant(to, head_dim):
        own = rotation if fuses_rope else None
        return output.apply_quantized(fused.run_quantized(heads, own, keys, values, layer, scales, to))
    if fused is not None and fuses_rope:
        attended = fused.run_with_rope(qkv, rotation, keys, values, layer, scales)
    else:
        attended = batch.attention.run(heads, keys, values, layer, scales)
    return output.apply(attended.reshape(tokens, -1))


class Attention:
    """Self-attention layer over a paged KV pool.

    It consists of a fused QKV projection, rotary embedding, paged attention and output projection. Some models (Qwen 3)
    normalize each query and key head before RoPE.
    """

    def __init__(
        self,
        qkv: LinearWeights,
        output: LinearWeights,
        heads: int,
        kv_heads: int,
        head_dim: int,
        layer: LayerAttention,
        kernels: KernelSet,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
    ) -> None:
        """Store the parts of a layer.

        layer: the layer's entry of `ModelConfig.attention`; q_norm, k_norm: norms over head_dim elements with one eps,
        both or neither.
        """
        self.qkv = qkv
        self.output = output
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.layer = layer
        self.kernels = kernels
        self.q_norm = q_norm
        self.k_norm = k_norm

    @classmethod
    def build(
        cls, config: ModelConfig, layer: LayerAttention, prefix: str, context: BuildContext, unit_offset: bool = False
    ) -> Self:
        """Allocate a layer with uninitialized weights.

        layer: the layer's entry of `ModelConfig.attention`; prefix: of the names of its linear layers, such as
        "model.layers.0.self_attn."; unit_offset: of the QK norms, see `RMSNorm`.
        """
        heads, kv_heads, head_dim, hidden = config.heads, config.kv_heads, config.head_dim, config.hidden_size
        parts = _parts(heads * head_dim, kv_heads * head_dim)
        qkv = context.linear(f"{prefix}qkv_proj", sum(parts.values()), hidden, config.qkv_bias, parts)
        output = context.linear(f"{prefix}o_proj", hidden, heads * head_dim, config.output_bias)
        q_norm, k_norm = (
            RMSNorm.build(head_dim, config.rms_norm_eps, context, unit_offset) if config.qk_norm else None
            for _ in range(2)
        )
        return cls(qkv, output, heads, kv_heads, head_dim, layer, context.kernels, q_norm, k_norm)

    def __call__(
        self,
        update: Tensor,
        residual: Tensor | None,
        norm: Norm,
        step: StepContext,
        state: LayerState,
    ) -> tuple[Tensor, Tensor]:
        """Return the next update and the residual stream, both [T, hidden].

        update, residual, norm: as in `LinearWeights.apply_normed`; state: the layer's keys and values.
        """
        assert isinstance(state, PagedKV)
        projected, residual = self.qkv.adapted(step.batch.adapters).apply_normed(update, residual, norm)
        qkv = projected.view(update.shape[0], -1, self.head_dim)
        if step.query_scales is not None:
            # RoPE is linear, so scaling before it is the same.
            qkv[:, : self.heads] *= step.query_scales
        q_norm, k_norm = self.q_norm, self.k_norm
        rotation = Rotation(*step.rotary[self.layer.rotary], step.batch.slot_mapping[self.layer.group])
        if q_norm is not None and k_norm is not None:
            rotation = rotation._replace(q_norm=q_norm.weight, k_norm=k_norm.weight, eps=q_norm.eps)
        given = (qkv, rotation, step.batch, state.keys, state.values, self.layer, self.output, self.kernels)
        return attend_and_project(*given, state.scales), residual

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors.

        Names are those of Hugging Face's Llama and Qwen 3.
        """
        parts = _parts(self.heads * self.head_dim, self.kv_heads * self.head_dim)
        slots = self.qkv.slots(prefix, "qkv_proj", parts) + self.output.slots(prefix, "o_proj")
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                slots += norm.slots(f"{prefix}{name}")
        return slots


def _parts(width: int, kv_width: int) -> dict[str, int]:
    """Return the outputs of each part of the first projection."""
    return {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
