"""The decoder that all families share, from token ids to logits.

It is an embedding, blocks, a norm and an output head. A family defines its blocks and, in its configuration, how they
differ from other families.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.kv_cache.storage import KVStorage
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.embedding import Embedding
from tandem.engine_core.layers.kv_scales import KVScales
from tandem.engine_core.layers.layer_state import LayerState, PagedKV, StepContext
from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.layers.moe import RoutingSwitch
from tandem.engine_core.layers.norm import RMSNorm, SandwichNorm
from tandem.engine_core.layers.rotary import RotaryTable, query_scale_table
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig, layer_prefix

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"


class Block(Protocol):
    """Attention and a feed-forward network with their norms."""

    def __call__(
        self,
        update: Tensor,
        residual: Tensor | None,
        step: StepContext,
        state: LayerState,
    ) -> tuple[Tensor, Tensor]:
        """Return the update of the residual stream, and the stream, both [T, hidden].

        update: that of the block before, [T, hidden]; residual: the stream that the update belongs to, None before the
        first block; state: of this layer.
        """

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors that have the prefix `prefix`."""


@dataclass(eq=False)
class Decoder:
    """Implement `registry.Model` around a family's blocks.

    The tensors around the blocks are named as in Hugging Face's Llama.
    """

    config: ModelConfig
    rotary_tables: tuple[RotaryTable, ...]
    embedding: Embedding
    layers: Sequence[Block]
    norm: RMSNorm | SandwichNorm
    head: LinearWeights
    kernels: KernelSet
    kv_scales: KVScales
    query_scales: Tensor | None
    """Factors of the queries by position, see `query_scale_table`."""
    routing: RoutingSwitch | None = None

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        max_positions: int,
        context: BuildContext,
        layers: Sequence[Block],
        norm: RMSNorm | SandwichNorm | None = None,
        embedding_scale: float = 1.0,
        routing: RoutingSwitch | None = None,
    ) -> "Decoder":
        """Allocate the modules around the blocks, without weights.

        Embedding and output head share their storage if they are tied. max_positions: number of positions of the rotary
        tables; norm: the last one, None for a plain one; embedding_scale: factor of the embeddings alone; routing: of
        the layers with experts, None if there are none.
        """
        vocab, hidden = config.vocab_size, config.hidden_size
        # A tied head is the embedding, which is never quantized.
        head = (
            context.method_for(None).build(vocab, hidden, False, context)
            if config.tie_embeddings
            else context.linear(HEAD, vocab, hidden)
        )
        return cls(
            config,
            tuple(RotaryTable.build(rope, max_positions, context.device) for rope in config.ropes),
            Embedding.tied_to(head, embedding_scale)
            if config.tie_embeddings
            else Embedding.build(vocab, hidden, context, embedding_scale),
            layers,
            norm or RMSNorm.build(hidden, config.rms_norm_eps, context),
            head,
            context.kernels,
            KVScales.build(config.layers, config.kv_heads, context.device),
            query_scale_table(config.query_scaling, max_positions, context.device, context.dtype),
            routing,
        )

    def forward(self, batch: ForwardBatch, kv: KVStorage) -> Tensor:
        """Implement `Model.forward`."""
        step = StepContext(
            batch,
            [table(batch.positions) for table in self.rotary_tables],
            None if self.query_scales is None else self.query_scales.index_select(0, batch.positions),
            None if batch.tokens is None else self.kernels.find_pieces(batch.tokens),
        )
        update: Tensor = self.embedding(batch.input_ids)
        residual: Tensor | None = None
        for layer, state in zip(self.layers, self._states(kv), strict=True):
            update, residual = layer(update, residual, step, state)
        assert residual is not None, "a model has at least one layer"
        if batch.sample_index is not None:
            update, residual = update[batch.sample_index], residual[batch.sample_index]
        hidden, _ = self.norm(update, residual)
        return hidden

    def _states(self, kv: KVStorage) -> list[LayerState]:
        """Return the memory of each layer."""
        scales = self.kv_scales.layers if kv.layout.has_scales else [None] * len(self.layers)
        own = [scales[layer] for layer in self.config.attention_layers]
        states: list[LayerState] = [PagedKV(*found) for found in zip(kv.keys, kv.values, own, strict=True)]
        for layer, state in zip(self.config.recurrent_layers, kv.recurrent, strict=True):
            states.insert(layer, state)
        return states

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Implement `Model.logits`."""
        logits, cap = self.head.apply(hidden, out), self.config.final_softcap
        return logits if cap is None else self.kernels.soft_cap(logits, cap)

    def weight_slots(self) -> list[WeightSlot]:
        """Implement `Loadable.weight_slots`."""
        head = self.head.slots("", HEAD)
        if self.config.tie_embeddings:
            head = [replace(slot, tied_to=f"{EMBEDDING}.weight") for slot in head]
        slots = self.embedding.slots(EMBEDDING)
        for index, layer in enumerate(self.layers):
            prefix = layer_prefix(index)
            slots += layer.slots(prefix)
            slots += self.kv_scales.slots(index, f"{prefix}self_attn.")
        return slots + self.norm.slots("model.norm") + head
