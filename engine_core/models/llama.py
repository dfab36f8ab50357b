"""Llama (Touvron et al., 2023): versions 1 to 3.2, and what shares the architecture, such as TinyLlama."""

import torch
from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch
from tandem.engine_core.kv_cache.storage import KVStorage
from tandem.engine_core.layers.attention import Attention
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.embedding import Embedding
from tandem.engine_core.layers.linear import Linear
from tandem.engine_core.layers.mlp import GatedMLP
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.layers.rotary import RotaryTable
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"


class LlamaLayer:
    """One block: attention and feed-forward, each behind a norm, each added to the residual stream."""

    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    @classmethod
    def build(cls, config: ModelConfig, context: BuildContext) -> "LlamaLayer":
        """Unfilled."""
        return cls(
            RMSNorm.build(config.hidden_size, config.rms_norm_eps, context),
            Attention.build(config, context),
            RMSNorm.build(config.hidden_size, config.rms_norm_eps, context),
            GatedMLP.build(config, context),
        )

    def __call__(
        self,
        update: Tensor,
        residual: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns what is to be added to the residual stream, and the stream. All [T, hidden]."""
        update, residual = self.attention(update, residual, self.attention_norm, rotary, batch, keys, values)
        return self.mlp(update, residual, self.mlp_norm)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Where checkpoint tensors go."""
        return {
            **self.attention_norm.slots(f"{prefix}input_layernorm"),
            **self.attention.slots(f"{prefix}self_attn."),
            **self.mlp_norm.slots(f"{prefix}post_attention_layernorm"),
            **self.mlp.slots(f"{prefix}mlp."),
        }


class LlamaModel:
    """The decoder with its output head. Call it in inference mode: there is no autograd here.

    Not a torch module: the machinery around a module's call takes longer than a small layer's arithmetic on a CPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryTable,
        embedding: Embedding,
        layers: list[LlamaLayer],
        norm: RMSNorm,
        head: Linear,
    ) -> None:
        self.config = config
        self.rotary = rotary
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head

    @classmethod
    def build(cls, config: ModelConfig, max_positions: int, context: BuildContext) -> "LlamaModel":
        """Unfilled; `loader.weights.load_weights` fills it."""
        vocab, hidden = config.vocab_size, config.hidden_size
        head = Linear.build(vocab, hidden, False, context)
        tied = config.tie_embeddings
        return cls(
            config,
            RotaryTable.build(config.rope, config.head_dim, max_positions, context.device),
            Embedding(head.weight if tied else torch.empty(vocab, hidden, device=context.device, dtype=context.dtype)),
            [LlamaLayer.build(config, context) for _ in range(config.layers)],
            RMSNorm.build(config.hidden_size, config.rms_norm_eps, context),
            head,
        )

    def forward(self, batch: ForwardBatch, kv: KVStorage) -> Tensor:
        """Final hidden states of the sampled positions, [S, hidden]. Writes the new keys and values into kv."""
        rotary = self.rotary(batch.positions)
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
        """hidden: [S, hidden]. Returns [S, vocab] in the model's dtype."""
        return self.head(hidden)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """As in `Loadable`."""
        slots = self.embedding.slots(EMBEDDING)
        for index, layer in enumerate(self.layers):
            slots |= layer.slots(f"model.layers.{index}.")
        return slots | self.norm.slots("model.norm") | self.head.slots("", HEAD)

    def tied_names(self) -> tuple[str, str] | None:
        """As in `Loadable`."""
        tied = self.embedding.weight is self.head.weight
        return (f"{EMBEDDING}.weight", f"{HEAD}.weight") if tied else None

    def untie(self) -> None:
        """As in `Loadable`."""
        self.embedding.weight = torch.empty_like(self.embedding.weight, memory_format=torch.contiguous_format)
