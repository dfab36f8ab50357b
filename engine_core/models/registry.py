"""The families of models, by the architecture that a config.json names."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from msgspec import structs
from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kv_cache.storage import KVStorage
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.kv_scales import KVScales
from tandem.engine_core.layers.moe import RoutingSwitch
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.folder import stored_dtypes
from tandem.engine_core.loader.slots import Loadable
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models import (
    gemma2,
    gemma3,
    llama,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from tandem.engine_core.models.config_fields import ConfigSource
from tandem.engine_core.models.decoder import EMBEDDING, HEAD
from tandem.engine_core.models.text_backbone import (
    TEXT_BACKBONES,
    dropped_names,
    dropping_rule,
    names_other_modules,
    text_name,
)
from tandem.engine_core.models.unsupported import describe
from tandem.engine_core.quantization.quantization import PACKED, Quantization

logger = logging.getLogger(__name__)

MAX_LOGGED = 5
"""Maximum number of modules in a line of the log."""


class Model(Loadable, Protocol):
    """A model as the runtime sees it.

    `forward` and `logits` are called in inference mode. A model is not a torch module: the machinery around a module's
    call takes longer than a small layer's arithmetic on a CPU.
    """

    config: ModelConfig
    kv_scales: KVScales
    """Scales of the keys and values in an 8-bit pool."""
    routing: RoutingSwitch | None
    """Switch of the routing of tokens to experts; None: no layer has experts."""

    def forward(self, batch: ForwardBatch, kv: KVStorage) -> Tensor:
        """Return the final hidden states of the sampled positions, [S, hidden].

        The new keys and values are written into kv.
        """

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits of hidden states, [S, vocab] in the model's dtype.

        hidden: [S, hidden]; out: memory for the result, contiguous.
        """


@dataclass(frozen=True, slots=True)
class Family:
    """The models of an architecture, and the functions that configure and build them."""

    models: str
    """Names that the makers gave the models."""
    read_config: Callable[[ConfigSource], ModelConfig]
    build: Callable[[ModelConfig, int, BuildContext], Model]
    """Allocates a model for a number of positions; its weights are not filled yet."""


FAMILIES = {
    "Gemma2ForCausalLM": Family("Gemma 2", gemma2.read_config, gemma2.build),
    "Gemma3ForCausalLM": Family("Gemma 3", gemma3.read_config, gemma3.build),
    "LlamaForCausalLM": Family("Llama 2 and 3", llama.read_config, llama.build),
    "Ministral3ForCausalLM": Family("Ministral 3 and Devstral Small 2", ministral3.read_config, ministral3.build),
    "MistralForCausalLM": Family("Mistral", mistral.read_config, mistral.build),
    "MixtralForCausalLM": Family("Mixtral", mixtral.read_config, mixtral.build),
    "Olmo2ForCausalLM": Family("OLMo 2", olmo2.read_config, olmo2.build),
    "OlmoeForCausalLM": Family("OLMoE", olmoe.read_config, olmoe.build),
    "Phi3ForCausalLM": Family("Phi-3 and Phi-4", phi3.read_config, phi3.build),
    "Qwen2ForCausalLM": Family("Qwen 2 and 2.5", qwen2.read_config, qwen2.build),
    "Qwen3ForCausalLM": Family("Qwen 3", qwen3.read_config, qwen3.build),
    "Qwen3_5ForCausalLM": Family("Qwen 3.5, 3.6 and 3.8 (dense)", qwen3_5.read_config, qwen3_5.build),
    "Qwen3_5MoeForCausalLM": Family("Qwen 3.5 and 3.6 MoE", qwen3_5_moe.read_config, qwen3_5_moe.build),
    "Qwen3NextForCausalLM": Family("Qwen3-Next", qwen3_next.read_config, qwen3_next.build),
    "Qwen3MoeForCausalLM": Family("Qwen 3 MoE", qwen3_moe.read_config, qwen3_moe.build),
}

FAMILY_TABLE = "engine_core/FAMILIES.md"
"""Table of the families in the documents."""


def read_config(directory: Path) -> ModelConfig:
    """Read the configuration of a model folder.

    Which linear layers are quantized follows from the names of the tensors, if the folder has the weights or their
    index, and in `build_model` from the headers.

    Raises ConfigError if a file is missing or malformed, if the architecture is not supported, which is checked before
    any other field, or if the configuration asks for something that its family does not support.
    """
    config = resolve_source(ConfigSource.open(directory))
    stored = None if config.quantization is None else stored_dtypes(directory)
    if config.quantization is None or stored is None:
        return config
    named = {name: dtype for name, dtype in stored.items() if dropping_rule(name, config.multimodal) is None}
    quantization = replace(config.quantization, unmatched=_unmatched(config.quantization, stored))
    return structs.replace(config, quantization=quantization.with_stored(named))


def resolve_source(source: ConfigSource) -> ModelConfig:
    """Return the `ModelConfig` of a model. Raises ConfigError as `read_config` does."""
    try:
        family = _find_family(source)
        config = FAMILIES[family].read_config(
            source.text_backbone() if source.architecture in TEXT_BACKBONES else source
        )
        return config if family == source.architecture else structs.replace(config, family=family)
    except ConfigError as error:
        raise ConfigError(f"{source.path}: {error}") from None


def open_checkpoint(directory: Path, config: ModelConfig) -> Checkpoint:
    """Open the checkpoint of a model.

    Tensors have the names of the text model by itself. Those of other modalities and of multi-token prediction are left
    out.

    Raises ConfigError as `Checkpoint.open` does.
    """
    checkpoint = Checkpoint.open(directory)
    dropped = Counter(
        rule for name in checkpoint.tensors if (rule := dropping_rule(name, config.multimodal)) is not None
    )
    counts = ", ".join(f"{rule} ({count})" for rule, count in dropped.items())
    if config.multimodal:
        text = "%s is multimodal; serving its text backbone without %d other tensors"
        logger.info(text, config.architecture, dropped.total())
    if dropped:
        logger.info("tensors that are not read: %s", counts)
    return checkpoint.renamed(partial(text_name, multimodal=config.multimodal))


def build_model(
    config: ModelConfig, context: BuildContext, max_positions: int | None = None, checkpoint: Checkpoint | None = None
) -> Model:
    """Allocate a model without weights.

    max_positions: maximum number of positions of a sequence, if below the config's. checkpoint: the one that will be
    loaded; if it holds an output head that differs from the embedding or is packed, the model is built untied
    regardless of the config, as transformers does.
    """
    if checkpoint is not None and config.tie_embeddings:
        is_packed = any(f"{HEAD}.{name}" in checkpoint.tensors for name in PACKED)
        tied = not is_packed and not checkpoint.tensors_differ(f"{EMBEDDING}.weight", f"{HEAD}.weight")
        config = structs.replace(config, tie_embeddings=tied)
    if checkpoint is not None:
        stored = {name: tensor.dtype for name, tensor in checkpoint.tensors.items()}
        context = replace(context, stored=stored)
        if context.quantization is not None:
            dtypes = {tensor.name: tensor.dtype for tensor in checkpoint.tensors.values()}
            context = replace(context, quantization=context.quantization.with_stored(dtypes))
    family = FAMILIES[config.family or config.architecture]
    try:
        model = family.build(config, max_positions or config.max_positions, context)
    except ConfigError as error:
        if checkpoint is None:
            raise
        raise ConfigError(f"{checkpoint.directory}: {error}") from None
    if context.quantization is not None:
        _log_names(
            "%d linear layers are stored in 16 bits although quantization_config does not exclude them; they are "
            "served in 16 bits: %s",
            context.quantization.stored_plain,
        )
        is_trial = context.device.type == "meta"  # Its caller reports them.
        if not is_trial and (entries := unmatched_entries(context.quantization, model)):
            logger.warning("%s", unmatched_text(entries))
        _log_names("%d scales of weights in 16 bits are not read: %s", context.quantization.stray)
    return model


def unmatched_entries(quantization: Quantization, model: Model) -> tuple[str, ...]:
    """Return the entries of a quantization config that match no module.

    They are matched with the tensor names of the checkpoint if these are known, else with those of the model. Entries
    for other modalities and multi-token prediction are left out.
    """
    if quantization.unmatched is not None:
        return quantization.unmatched
    return _unmatched(quantization, [slot.name for slot in model.weight_slots()])


def unmatched_text(entries: tuple[str, ...]) -> str:
    """Name entries that `unmatched_entries` returned."""
    more = ", ..." if len(entries) > MAX_LOGGED else ""
    return (
        f"{len(entries)} entries of quantization_config name no module of the model, so they change nothing: "
        f"{', '.join(entries[:MAX_LOGGED])}{more}"
    )


def _unmatched(quantization: Quantization, tensors: Iterable[str]) -> tuple[str, ...]:
    known = [*tensors, *dropped_names(), f"{EMBEDDING}.weight", f"{HEAD}.weight"]
    return tuple(entry for entry in quantization.unmatched_entries(known) if not names_other_modules(entry))


def _log_names(text: str, names: set[str]) -> None:
    """Log the number of some names, and the first of them."""
    if found := sorted(names):
        logger.info(text, len(found), ", ".join(found[:MAX_LOGGED]) + (", ..." if len(found) > MAX_LOGGED else ""))


def _find_family(source: ConfigSource) -> str:
    """Return the architecture of the family of a model, that of the text backbone if it is multimodal.

    Raises ConfigError that lists the known ones if it has none.
    """
    architecture = source.architecture
    models = ", ".join(family.models for family in FAMILIES.values())
    known = f"supported are models of these families: {models}; {FAMILY_TABLE} lists them"
    backbones = TEXT_BACKBONES.get(architecture)
    if backbones is not None:
        text = source.fields.get("text_config")
        found = text.get("model_type") if isinstance(text, dict) else None
        if not isinstance(found, str) or found not in backbones:
            quoted = " or ".join(f'"{known_type}"' for known_type in backbones)
            raise ConfigError(
                f'the architecture {architecture} is multimodal, and its text_config of model_type "{found}" is not '
                f"supported, only {quoted}; {known}"
            )
        return backbones[found]
    if architecture not in FAMILIES:
        nature = describe(architecture, source.fields)
        raise ConfigError(f"the architecture {architecture} is not supported{nature and ': it is ' + nature}; {known}")
    return architecture
