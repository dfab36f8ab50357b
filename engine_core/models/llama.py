"""Llama (Touvron et al., 2023), versions 1 to 3.2.

Models that share its architecture, such as TinyLlama, are included.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch, LayerAttention
from tandem.engine_core.kv_cache.storage import KVStorage
from tandem.engine_core.layers.attention import Attention, layer_attentions
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.embedding import Embedding
from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.layers.mlp import GatedMLP
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.layers.rotary import RotaryTable
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"


class LlamaLayer:
    """One block: attention and a feed-forward network.

    Each comes after a norm and is added to the residual stream.
    """

    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    @classmethod
    def build(cls, config: ModelConfig, layer: LayerAttention, context: BuildContext) -> "LlamaLayer":
        """Allocate a block whose weights are not filled yet.

        layer: the block's entry of `layer_attentions`.
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


class LlamaModel:
    """The decoder with its output head.

    Call it in inference mode, because it does not support autograd. It is not a torch module: the machinery around a
    module's call takes longer than a small layer's arithmetic on a CPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        rotary_tables: tuple[RotaryTable, ...],
        embedding: Embedding,
        layers: list[LlamaLayer],
        norm: RMSNorm,
        head: LinearWeights,
    ) -> None:
        self.config = config
        self.rotary_tables = rotary_tables
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head

    @classmethod
    def build(cls, config: ModelConfig, max_positions: int, context: BuildContext) -> "LlamaModel":
        """Allocate a model whose weights are not filled yet.

        `loader.weights.load_weights` fills them.
        """
        vocab, hidden = config.vocab_size, config.hidden_size
        head = context.head_method.build(vocab, hidden, False, context)
        return cls(
            config,
            (RotaryTable.build(config.rope, max_positions, context.device),),
            Embedding.tied_to(head) if config.tie_embeddings else Embedding.build(vocab, hidden, context),
            [LlamaLayer.build(config, layer, context) for layer in layer_attentions(config)],
            RMSNorm.build(hidden, config.rms_norm_eps, context),
            head,
        )

    def forward(self, batch: ForwardBatch, kv: KVStorage) -> Tensor:
        """Implement `Model.forward`."""
        rotary = [table(batch.positions) for table in self.rotary_tables]
        update: Tensor = self.embedding(batch.input_ids)
        residual: Tensor | None = None
        for layer, keys, values in zip(self.layers, kv.keys, kv.values, strict=True):
            update, residual = layer(update, residual, rotary, batch, keys, values)
        assert residual is not None, "a model has at least one layer"
        if batch.sample_index is not None:
            update, residual = update[batch.sample_index], residual[batch.sample_index]
        hidden, _ = self.norm(update, residual)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Implement `Model.logits`."""
        return self.head.apply(hidden)

    def weight_slots(self) -> list[WeightSlot]:
        """Implement `Loadable.weight_slots`."""
        head = self.head.slots("", HEAD)
        if self.config.tie_embeddings:
            head = [replace(slot, tied_to=f"{EMBEDDING}.weight") for slot in head]
        slots = self.embedding.slots(EMBEDDING)
        for index, layer in enumerate(self.layers):
            slots += layer.slots(f"model.layers.{index}.")
        return slots + self.norm.slots("model.norm") + head
