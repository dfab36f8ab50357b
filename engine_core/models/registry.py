"""The models, by the architecture that a config.json names."""

from typing import Protocol

from msgspec import structs
from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kv_cache.storage import KVStorage
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.slots import Loadable
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.llama import EMBEDDING, HEAD, LlamaModel

BUILDERS = {
    "LlamaForCausalLM": LlamaModel.build,
    # The same decoder with norms of queries and keys, see `ModelConfig.qk_norm`.
    "Qwen3ForCausalLM": LlamaModel.build,
}


class Model(Loadable, Protocol):
    """A model as the runtime sees it.

    `forward` and `logits` are called in inference mode.
    """

    config: ModelConfig

    def forward(self, batch: ForwardBatch, kv: KVStorage) -> Tensor:
        """Return the final hidden states of the sampled positions, [S, hidden].

        The new keys and values are written into kv.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, [S, vocab] in the model's dtype.

        hidden: [S, hidden].
        """


def check_architecture(config: ModelConfig) -> None:
    """Raise ConfigError for an architecture that is not supported."""
    if config.architecture not in BUILDERS:
        supported = ", ".join(BUILDERS)
        raise ConfigError(f"the architecture {config.architecture} is not supported; supported: {supported}")


def build_model(
    config: ModelConfig, context: BuildContext, max_positions: int | None = None, checkpoint: Checkpoint | None = None
) -> Model:
    """Allocate a model whose weights are not filled yet.

    max_positions: largest number of positions of a sequence, if below that of the config. checkpoint: the one that will
    be loaded; if it holds an output head that differs from the embedding, the model is built untied whatever the config
    says, as transformers does. Raises ConfigError if the architecture is not supported.
    """
    check_architecture(config)
    if checkpoint is not None and config.tie_embeddings:
        tied = not checkpoint.tensors_differ(f"{EMBEDDING}.weight", f"{HEAD}.weight")
        config = structs.replace(config, tie_embeddings=tied)
    return BUILDERS[config.architecture](config, max_positions or config.max_positions, context)
