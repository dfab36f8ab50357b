"""The parts that all decoders have around their layers.

Their tensors are named as in Hugging Face's Llama.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.embedding import Embedding
from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.layers.rotary import RotaryTable
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"


class Part(Protocol):
    """A layer or a norm as the loader sees it."""

    def slots(self, name: str, /) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors, whose names begin with `name`."""


def build_embedding(config: ModelConfig, context: BuildContext, scale: float = 1.0) -> tuple[Embedding, LinearWeights]:
    """Allocate the embedding and the output head.

    They share their storage if they are tied. scale: factor of the embeddings alone.
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    head = context.head_method.build(vocab, hidden, False, context)
    if config.tie_embeddings:
        return Embedding.tied_to(head, scale), head
    return Embedding.build(vocab, hidden, context, scale), head


def build_rotary(config: ModelConfig, max_positions: int, context: BuildContext) -> tuple[RotaryTable, ...]:
    """Compute the rotary tables of positions 0 to `max_positions - 1`."""
    return tuple(RotaryTable.build(rope, max_positions, context.device) for rope in config.ropes)


def select_sampled(update: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """Return the sampled positions of the last update and the residual stream.

    Both are [S, hidden].
    """
    assert residual is not None, "a model has at least one layer"
    if batch.sample_index is None:
        return update, residual
    return update[batch.sample_index], residual[batch.sample_index]


def decoder_slots(
    config: ModelConfig,
    embedding: Embedding,
    layers: Sequence[Part],
    norm: Part,
    head: LinearWeights,
) -> list[WeightSlot]:
    """List the slots of all of a decoder's tensors."""
    heads = head.slots("", HEAD)
    if config.tie_embeddings:
        heads = [replace(slot, tied_to=f"{EMBEDDING}.weight") for slot in heads]
    slots = embedding.slots(EMBEDDING)
    for index, layer in enumerate(layers):
        slots += layer.slots(f"model.layers.{index}.")
    return slots + norm.slots("model.norm") + heads
