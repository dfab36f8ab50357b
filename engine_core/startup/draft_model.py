"""The draft model of an engine: what it must have in common with the model that it drafts for."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from tandem.engine_core.config import StepConfig
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kv_cache.groups import KVGroup
from tandem.engine_core.kv_cache.storage import KVLayout
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.quantization.quantization import FP8_AT_LOAD
from tandem.engine_core.startup.runtime import ModelSource


def resolve_draft(directory: Path, target: ModelSource, config: StepConfig) -> ModelSource:
    """Return the draft model, of which only the configuration and the tokenizer are read.

    Its keys and values have the dtype of the target's. It is quantized as its checkpoint, or by --quantize.

    Raises ConfigError, naming the flag, for a model that cannot draft for this one.
    """
    flag = f"--speculate model:{directory}"
    try:
        model = read_config(directory)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if config.options.quantize != "off" and model.quantization is None:
        model = structs.replace(model, quantization=FP8_AT_LOAD)
    if model.vocab_size != target.model.vocab_size:
        raise ConfigError(
            f"{flag}: a vocabulary of {model.vocab_size} ids, but that of the model has {target.model.vocab_size}; use "
            "a draft model of the same family and size of vocabulary"
        )
    try:
        problem = _tokenizer_problem(directory, target.directory)
    except ConfigError as error:
        problem = str(error)
    if problem:
        raise ConfigError(f"{flag}: {problem}; use a draft model with the same tokenizer")
    if model.recurrent_layers:
        raise ConfigError(
            f"{flag}: {model.architecture} has recurrent layers, whose state cannot go back to the last accepted "
            "draft; use a draft model without them"
        )
    if (longest := max(model.max_positions, model.longest_context)) < config.max_len:
        raise ConfigError(
            f"{flag}: its positions end at {longest}, and --max-len is {config.max_len}; lower that, or use a draft "
            "model of longer sequences"
        )
    _check_windows(flag, model, target, config)
    groups = (KVGroup(tuple(range(model.layers)), model.kv_heads, model.head_dim),)
    layout = KVLayout(groups=groups, page_size=config.page_size, dtype=target.layout.dtype)
    return ModelSource(directory, model, target.dtype, layout)


def _check_windows(flag: str, model: ModelConfig, target: ModelSource, config: StepConfig) -> None:
    """Raise ConfigError for windows: the draft model's pages are those of all positions."""
    if any(config.kv_windows):
        raise ConfigError(
            f"{flag}: {target.model.architecture} has layers with windows, whose pages a draft model cannot share; use "
            "--speculate ngram or off"
        )
    windows = [model.attention[layer].window for layer in model.attention_layers]
    if any(window is not None and window < config.max_len for window in windows):
        raise ConfigError(
            f"{flag}: {model.architecture} has layers with windows, which are not supported in a draft model; use one "
            "without them, or --speculate ngram"
        )


def _tokenizer_problem(draft: Path, target: Path) -> str:
    """Return how the ids of two tokenizers differ; empty if they are equal, or if neither folder has one."""
    files = draft / "tokenizer.json", target / "tokenizer.json"
    missing = [file for file in files if not file.is_file()]
    if len(missing) == len(files):
        return ""
    if missing:
        return f"there is no {missing[0]}"
    one, other = files
    if one.read_bytes() == other.read_bytes():
        return ""
    ids, expected = _token_ids(one), _token_ids(other)
    differing = [token for token in ids.keys() | expected.keys() if ids.get(token) != expected.get(token)]
    if not differing:
        return ""
    token = min(differing)
    return (
        f"{len(differing)} tokens have other ids than in the model's tokenizer, such as {token!r}: "
        f"{ids.get(token)} and {expected.get(token)}"
    )


def _token_ids(file: Path) -> dict[str, int]:
    """Return the id of each token of a tokenizer.json. Raises ConfigError for one that is malformed."""
    try:
        found: dict[str, Any] = msgspec.json.decode(file.read_bytes())
        vocab = found["model"]["vocab"]
        ids = dict(vocab) if isinstance(vocab, dict) else {piece[0]: index for index, piece in enumerate(vocab)}
        return ids | {added["content"]: added["id"] for added in found.get("added_tokens", [])}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is malformed: {type(error).__name__}: {error}") from None
