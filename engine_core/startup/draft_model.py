"""The draft model of an engine: what it must have in common with the model that it drafts for."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from tandem.engine_core.config import StepConfig
from tandem.engine_core.errors import ConfigError, naming
from tandem.engine_core.kv_cache.groups import KVGroup
from tandem.engine_core.kv_cache.storage import KVLayout
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.quantization.quantization import FP8_AT_LOAD
from tandem.engine_core.startup.runtime import ModelSource


def resolve_draft(directory: Path, target: ModelSource, config: StepConfig) -> ModelSource:
    """Return the draft model, of which only the configuration and the tokenizer are read.

    Its keys and values have the dtype of the target's, and those of all positions are kept, whatever its windows. It is
    quantized as its checkpoint, or by --quantize.

    Raises ConfigError, naming the flag, for a model that cannot draft for this one.
    """
    flag = f"--speculate model:{directory}"
    with naming(flag):
        model = read_config(directory)
    if config.options.quantize != "off" and model.quantization is None:
        model = structs.replace(model, quantization=FP8_AT_LOAD)
    try:
        problem = _tokenizer_problem(directory, target.directory, (model.vocab_size, target.model.vocab_size))
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
    if any(config.kv_windows):
        raise ConfigError(
            f"{flag}: {target.model.architecture} has layers with windows, and a draft model needs the pages that they "
            "give up; keep these by --page-size max, or use --speculate ngram or off"
        )
    groups = (KVGroup(tuple(range(model.layers)), model.kv_heads, model.head_dim),)
    layout = KVLayout(groups=groups, page_size=config.page_size, dtype=target.layout.dtype)
    return ModelSource(directory, model, target.dtype, layout)


def _tokenizer_problem(draft: Path, target: Path, vocab_sizes: tuple[int, int]) -> str:
    """Return how the ids of two tokenizers differ, or which the smaller vocabulary lacks; empty if they agree.

    Checkpoints of a family may pad their vocabulary to different sizes, above the ids of their tokenizer. Equal sizes
    suffice if neither folder has a tokenizer. vocab_sizes: of the draft model and of the target.
    """
    sizes = "a vocabulary of {} ids, but that of the model has {}".format(*vocab_sizes)
    have_equal_sizes = len(set(vocab_sizes)) == 1
    files = draft / "tokenizer.json", target / "tokenizer.json"
    missing = [file for file in files if not file.is_file()]
    if len(missing) == len(files):
        return "" if have_equal_sizes else f"{sizes}, and there is no {files[0]} to show that both have the same tokens"
    if missing:
        return f"there is no {missing[0]}"
    one, other = files
    if have_equal_sizes and one.read_bytes() == other.read_bytes():
        return ""
    ids, expected = _token_ids(one), _token_ids(other)
    differing = [token for token in ids.keys() | expected.keys() if ids.get(token) != expected.get(token)]
    if differing:
        token = min(differing)
        return (
            f"{len(differing)} tokens have other ids than in the model's tokenizer, such as {token!r}: "
            f"{ids.get(token)} and {expected.get(token)}"
        )
    last = max(ids.values(), default=-1)
    if not have_equal_sizes and last >= min(vocab_sizes):
        return f"{sizes}, and the tokenizer has ids up to {last}"
    return ""


def _token_ids(file: Path) -> dict[str, int]:
    """Return the id of each token of a tokenizer.json. Raises ConfigError for one that is malformed."""
    try:
        found: dict[str, Any] = msgspec.json.decode(file.read_bytes())
        vocab = found["model"]["vocab"]
        ids = dict(vocab) if isinstance(vocab, dict) else {piece[0]: index for index, piece in enumerate(vocab)}
        return ids | {added["content"]: added["id"] for added in found.get("added_tokens", [])}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is malformed: {type(error).__name__}: {error}") from None
