"""The model that an engine serves, which weights that take the place of its own have to be of."""

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.registry import read_config
from tandem.protocol.model_folder import TemplateFileError, find_templates, special_tokens, template_fingerprint

_USED_TOKENS = ("bos_token", "eos_token")


class ServedModel(Struct, frozen=True):
    """What the folder of a model says besides its weights, as read at one moment: its files may change later."""

    folder: Path
    config: ModelConfig
    files: dict[str, Any]
    """Contents of further files, or their digests, by what errors call them."""

    @classmethod
    def read(cls, folder: Path) -> "ServedModel":
        """Read the folder. Raises ConfigError for files that are missing or malformed."""
        files = {
            "tokenizer.json": _digest(folder / "tokenizer.json"),
            "the chat template": template_fingerprint(folder),
            "the set of special tokens": _special_tokens(folder),
            "generation_config.json": _json(folder / "generation_config.json"),
        }
        return cls(folder, _without_tensors(read_config(folder)), files)


def _without_tensors(config: ModelConfig) -> ModelConfig:
    """Return a configuration without the names of stored tensors, some of which a checkpoint may have or lack."""
    quantization = config.quantization
    if quantization is None:
        return config
    return structs.replace(config, quantization=replace(quantization, stored=None, stored_as={}, unmatched=None))


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else "missing"


def _special_tokens(folder: Path) -> dict[str, str]:
    """Return the tokens of the begin and the end, and those that the chat template names. Nothing uses others."""
    try:
        tokens = special_tokens(folder)
    except TemplateFileError as error:
        raise ConfigError(str(error)) from None
    with suppress(TemplateFileError):  # It has no fingerprint either.
        source = find_templates(folder)
        texts = [] if source is None else list(source.texts.values())
        return {k: v for k, v in tokens.items() if k in _USED_TOKENS or any(k in text for text in texts)}
    return tokens


def _json(file: Path) -> Any:
    if not file.is_file():
        return None
    try:
        fields = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None
    # The version of the library that wrote it changes nothing.
    return {k: v for k, v in fields.items() if k != "transformers_version"} if isinstance(fields, dict) else fields
