"""Phi-3 (Abdin et al., 2024), Phi-3.5-mini, Phi-4 and Phi-4-mini.

It is Llama's decoder without biases, with fused projections in the checkpoint. Of each head of Phi-4-mini three
quarters turn. Versions for long contexts have LongRoPE, and some have a sliding window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch, LayerAttention
from tandem.engine_core.kv_cache.storage import KVStorage
from tandem.engine_core.layers.attention import Attention
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.embedding import Embedding
from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.layers.mlp import GatedMLP
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.layers.rotary import RotaryTable
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.config_fields import ConfigFields, ConfigSource
from tandem.engine_core.models.decoder import build_embedding, build_rotary, decoder_slots, select_sampled
from tandem.engine_core.rope_config import Count, Positive


class Phi3Fields(ConfigFields, kw_only=True):
    """The fields of config.json that this family reads."""

    max_position_embeddings: Count = 4096
    original_max_position_embeddings: Count | None = 4096
    rms_norm_eps: Positive = 1e-5
    sliding_window: Count | None = None
    """Positions that a query sees; null: all before it."""


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the facts of a model from its config.json."""
    fields = source.read(Phi3Fields)
    head_dim = fields.head_dim or fields.hidden_per_head
    return source.resolve(
        fields,
        head_dim=head_dim,
        attention=[LayerAttention(head_dim**-0.5, fields.sliding_window)] * fields.num_hidden_layers,
        # The first checkpoints call LongRoPE "su" or even "yarn".
        ropes=[fields.rope(head_dim, partial=True, longrope_names=("su", "yarn"))],
    )


@dataclass(eq=False)
class Phi3Layer:
    """One block: attention and a feed-forward network.

    Each comes after a norm and is added to the residual stream.
    """

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    @classmethod
    def build(cls, config: ModelConfig, layer: LayerAttention, context: BuildContext) -> "Phi3Layer":
        """Allocate a block whose weights are not filled yet.

        layer: the block's entry of `ModelConfig.attention`.
        """
        return cls(
            RMSNorm.build(config.hidden_size, config.rms_norm_eps, context),
            Attention.build(config, layer, context),
            RMSNorm.build(config.hidden_size, config.rms_norm_eps, context),
            GatedMLP.build(config, context),
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

        update: that of the block before, [T, hidden]; residual: the stream that the update belongs to, None before the
        first block; rotary, keys, values: those of `Attention.__call__`.
        """
        update, residual = self.attention(update, residual, self.attention_norm, rotary, batch, keys, values)
        return self.mlp(update, residual, self.mlp_norm)

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors."""
        return [
            *self.attention_norm.slots(f"{prefix}input_layernorm"),
            *self.attention.slots(f"{prefix}self_attn."),
            *self.mlp_norm.slots(f"{prefix}post_attention_layernorm"),
            *self.mlp.slots(f"{prefix}mlp."),
        ]


@dataclass(eq=False)
class Phi3Model:
    """The decoder with its output head."""

    config: ModelConfig
    rotary_tables: tuple[RotaryTable, ...]
    embedding: Embedding
    layers: list[Phi3Layer]
    norm: RMSNorm
    head: LinearWeights

    @classmethod
    def build(cls, config: ModelConfig, max_positions: int, context: BuildContext) -> "Phi3Model":
        """Allocate a model whose weights are not filled yet."""
        rotary = build_rotary(config, max_positions, context)
        embedding, head = build_embedding(config, context)
        layers = [Phi3Layer.build(config, layer, context) for layer in config.attention]
        return cls(
            config, rotary, embedding, layers, RMSNorm.build(config.hidden_size, config.rms_norm_eps, context), head
        )

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
        return self.head.apply(hidden)

    def weight_slots(self) -> list[WeightSlot]:
        """Implement `Loadable.weight_slots`."""
        return decoder_slots(self.config, self.embedding, self.layers, self.norm, self.head)
