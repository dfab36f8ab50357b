"""Gemma 2 (Gemma Team, 2024).

Layers with a sliding window alternate with layers without. Norms stand before and after every block, and multiply by 1
plus the stored weight. Scores of attention and logits are soft-capped, and embeddings are scaled.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from msgspec import field
from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch, LayerAttention
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.kv_cache.storage import KVStorage
from tandem.engine_core.layers.attention import Attention
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.embedding import Embedding
from tandem.engine_core.layers.linear import LinearWeights, Norm
from tandem.engine_core.layers.mlp import GatedMLP
from tandem.engine_core.layers.norm import RMSNorm, SandwichNorm
from tandem.engine_core.layers.rotary import RotaryTable
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.config_fields import FULL, ConfigFields, ConfigSource
from tandem.engine_core.models.decoder import build_embedding, build_rotary, decoder_slots, select_sampled
from tandem.engine_core.models.sliding_fields import SLIDING, windows_of_types
from tandem.engine_core.rope_config import Count, Positive

logger = logging.getLogger(__name__)


class Gemma2Fields(ConfigFields, kw_only=True):
    """The fields of config.json that this family reads."""

    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 256
    max_position_embeddings: Count = 8192
    tie_word_embeddings: bool = True
    eos_token_id: int | list[int] | None = 1
    hidden_act: str = field(default="gelu_pytorch_tanh", name="hidden_activation")
    attention_bias: bool = False
    """True if all projections of attention, the output's included, have biases."""
    query_pre_attn_scalar: Positive = 256
    """Number whose inverse square root scales the scores, in place of the head size."""
    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0
    sliding_window: Count | None = 4096
    layer_types: list[str] | None = None


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the facts of a model from its config.json."""
    fields = source.read(Gemma2Fields)
    layers, head_dim = fields.num_hidden_layers, fields.head_dim or fields.hidden_per_head
    types = fields.layer_types or [FULL if index % 2 else SLIDING for index in range(layers)]
    windows = windows_of_types(types, layers, fields.sliding_window)
    scale, cap = fields.query_pre_attn_scalar**-0.5, fields.attn_logit_softcapping
    return source.resolve(
        fields,
        head_dim=head_dim,
        attention=[LayerAttention(scale, window, cap) for window in windows],
        ropes=[fields.rope(head_dim)],
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        final_softcap=fields.final_logit_softcapping,
    )


@dataclass(eq=False)
class Gemma2Layer:
    """One block: attention and a feed-forward network.

    Each comes after a norm, and what it returns is normalised before it is added to the residual stream.
    """

    attention_norm: Norm
    """The norm of the stream before attention, behind that of the block before."""
    attention: Attention
    mlp_norm: SandwichNorm
    """The norm of the stream before the feed-forward network, behind that of attention."""
    mlp: GatedMLP
    norms: dict[str, RMSNorm]
    """The four norms by their names in the checkpoint."""

    @classmethod
    def build(
        cls, config: ModelConfig, layer: LayerAttention, before: "Gemma2Layer | None", context: BuildContext
    ) -> "Gemma2Layer":
        """Allocate a block whose weights are not filled yet.

        layer: the block's entry of `ModelConfig.attention`; before: the block before, None for the first.
        """
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        norms = {
            name: RMSNorm.build(config.hidden_size, config.rms_norm_eps, context, unit_offset=True) for name in names
        }
        first = norms["input"]
        return cls(
            first if before is None else SandwichNorm(before.norms["post_feedforward"], first),
            Attention.build(config, layer, context),
            SandwichNorm(norms["post_attention"], norms["pre_feedforward"]),
            GatedMLP.build(config, context),
            norms,
        )

    def __call__(
        self,
        update: Tensor,
        residual: Tensor | None,
        rotary: Sequence[tuple[Tensor, Tensor]],
        batch: ForwardBatch,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the update of the residual stream, and the stream, both [T, hidden].

        update: that of the block before, [T, hidden], not normalised yet; residual: the stream that the update belongs
        to, None before the first block; rotary, keys, values: those of `Attention.__call__`.
        """
        update, residual = self.attention(update, residual, self.attention_norm, rotary, batch, keys, values)
        return self.mlp(update, residual, self.mlp_norm)

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors."""
        norms = [slot for name, norm in self.norms.items() for slot in norm.slots(f"{prefix}{name}_layernorm")]
        return [*norms, *self.attention.slots(f"{prefix}self_attn."), *self.mlp.slots(f"{prefix}mlp.")]


@dataclass(eq=False)
class Gemma2Model:
    """The decoder with its output head."""

    config: ModelConfig
    rotary_tables: tuple[RotaryTable, ...]
    embedding: Embedding
    layers: list[Gemma2Layer]
    norm: SandwichNorm
    """The final norm, behind that of the last block."""
    head: LinearWeights
    kernels: KernelSet

    @classmethod
    def build(cls, config: ModelConfig, max_positions: int, context: BuildContext) -> "Gemma2Model":
        """Allocate a model whose weights are not filled yet."""
        if context.dtype == torch.float16:
            logger.warning("activations of Gemma 2 may exceed float16's range, and their requests fail; use bfloat16")
        rotary = build_rotary(config, max_positions, context)
        embedding, head = build_embedding(config, context, scale=config.hidden_size**0.5)
        layers: list[Gemma2Layer] = []
        for layer in config.attention:
            layers.append(Gemma2Layer.build(config, layer, layers[-1] if layers else None, context))
        final = RMSNorm.build(config.hidden_size, config.rms_norm_eps, context, unit_offset=True)
        norm = SandwichNorm(layers[-1].norms["post_feedforward"], final)
        return cls(config, rotary, embedding, layers, norm, head, context.kernels)

    def forward(self, batch: ForwardBatch, kv: KVStorage) -> Tensor:
        """Implement `Model.forward`."""
        rotary = [table(batch.positions) for table in self.rotary_tables]
        update: Tensor = self.embedding(batch.input_ids)
        residual: Tensor | None = None
        for layer, keys, values in zip(self.layers, kv.keys, kv.values, strict=True):
            update, residual = layer(update, residual, rotary, batch, keys, values)
        hidden, _ = self.norm(*select_sampled(update, residual, batch))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Implement `Model.logits`."""
        logits, cap = self.head.apply(hidden), self.config.final_softcap
        return logits if cap is None else self.kernels.soft_cap(logits, cap)

    def weight_slots(self) -> list[WeightSlot]:
        """Implement `Loadable.weight_slots`."""
        return decoder_slots(self.config, self.embedding, self.layers, self.norm, self.head)
