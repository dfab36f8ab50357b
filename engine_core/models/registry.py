"""From the architecture that a config.json names to a model."""

from typing import Protocol

import torch
from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kv_cache.storage import KVStorage
from tandem.engine_core.layers.build_context import BuildContext, torch_build_context
from tandem.engine_core.loader.slots import Loadable
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.llama import LlamaModel

BUILDERS = {
    "LlamaForCausalLM": LlamaModel.build,
    # The same decoder with norms of queries and keys, see `ModelConfig.qk_norm`.
    "Qwen3ForCausalLM": LlamaModel.build,
}


class Model(Loadable, Protocol):
    """A model as the runtime sees it. Both calls are made in inference mode."""

    config: ModelConfig

    def forward(self, batch: ForwardBatch, kv: KVStorage) -> Tensor:
        """Final hidden states of the sampled positions, [S, hidden]. Writes the new keys and values into kv."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [S, hidden]. Returns [S, vocab] in the model's dtype."""


def build_model(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int | None = None,
    context: BuildContext | None = None,
) -> Model:
    """A model with unfilled weights, of plain torch unless `context` says otherwise.

    max_positions: how many positions a sequence may have, if fewer than the config says. Raises ConfigError if the
    architecture is unknown.
    """
    builder = BUILDERS.get(config.architecture)
    if builder is None:
        supported = ", ".join(BUILDERS)
        raise ConfigError(f"the architecture {config.architecture} is not supported; supported: {supported}")
    return builder(config, max_positions or config.max_positions, context or torch_build_context(device, dtype))
