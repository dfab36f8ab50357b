"""Select the files of a repository that are needed to serve a model."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from tandem.protocol.model_folder import QUANTIZATION_FILES

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

TOKENIZER = "tokenizer.json"
TOKENIZER_SOURCES = ("tokenizer.model", "vocab.json", "tiktoken.model")
"""Files that a tokenizer can be converted from without a tokenizer.json."""
_SMALL_FILES = frozenset(
    {CONFIG, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
     "merges.txt", "chat_template.jinja", "chat_template.json", TOKENIZER, *TOKENIZER_SOURCES,
     *QUANTIZATION_FILES}
)  # fmt: skip
_MORE_TEMPLATES = re.compile(r"additional_chat_templates/[\w-][\w.-]*\.jinja")
_SHARD = re.compile(r"[\w-][\w.-]*\.safetensors")
_FORMATS = (
    (re.compile(r"consolidated.*\.safetensors"), "Mistral's own format (consolidated.safetensors)"),
    (re.compile(r"adapter_model\.safetensors"), "a LoRA adapter (adapter_model.safetensors)"),
    (re.compile(r".*\.(bin|pth|pt|ckpt)"), "PyTorch files (.bin, .pth)"),
    (re.compile(r".*\.gguf"), "GGUF"),
    (re.compile(r".*\.onnx"), "ONNX"),
    (re.compile(r".*\.h5"), "TensorFlow files (.h5)"),
    (re.compile(r".*\.msgpack"), "Flax files (.msgpack)"),
    (re.compile(r".*\.safetensors"), f"safetensors of other names than {SINGLE}"),
)


class SelectionError(Exception):
    """The repository lacks files of a model; the message lists what it has."""


class _Index(Struct):
    weight_map: dict[str, str]


def small_files(names: Iterable[str]) -> list[str]:
    """Select the configuration, tokenizer and chat templates.

    `config.json` comes last: once it exists, the others do.
    """
    chosen = {name for name in names if name in _SMALL_FILES or _MORE_TEMPLATES.fullmatch(name)}
    return sorted(chosen, key=lambda name: (name == CONFIG, name))


def weight_index(names: Collection[str]) -> str | None:
    """Return the name of the index of shards, or None for weights in one file.

    Raises SelectionError for a repository without weights in safetensors.
    """
    if SINGLE in names:
        return None
    if INDEX in names:
        return INDEX
    formats = formats_of(names)
    has = f"it has {', '.join(formats)}" if formats else "it has no weights in any known format"
    raise SelectionError(f"has neither {SINGLE} nor {INDEX}; {has}. Choose a repository with safetensors")


def formats_of(names: Iterable[str]) -> list[str]:
    """List the formats of weights among some files."""
    found = (next((text for form, text in _FORMATS if form.fullmatch(Path(name).name)), "") for name in names)
    return sorted(set(found) - {""})


def shards(index: bytes, names: Collection[str]) -> list[str]:
    """Return the shards listed in an index.

    Raises SelectionError for an invalid index, or one that lists files missing from the repository.
    """
    try:
        named = _named(index)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SelectionError(f"has an {INDEX} that cannot be read: {error}") from None
    wrong = [name for name in named if name not in names or _SHARD.fullmatch(name) is None]
    if wrong or not named:
        what = f"files that the repository lacks: {', '.join(wrong[:3])}" if wrong else "no files"
        raise SelectionError(f"has an {INDEX} that names {what}. Choose another revision with --revision")
    return named


def has_tokenizer(folder: Path) -> bool:
    """Return True for a folder with a tokenizer, or with files to convert one from."""
    return any((folder / name).is_file() for name in (TOKENIZER, *TOKENIZER_SOURCES))


def missing(folder: Path, with_weights: bool) -> str:
    """Return the first file missing from a model folder; "" if it is complete."""
    if not has_tokenizer(folder):
        return TOKENIZER
    if not (folder / CONFIG).is_file():
        return CONFIG
    if not with_weights or (folder / SINGLE).is_file():
        return ""
    try:
        named = _named((folder / INDEX).read_bytes())
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return SINGLE
    return next((name for name in named if not (folder / name).is_file()), "" if named else SINGLE)


def _named(index: bytes) -> list[str]:
    """Return the files listed in an index. Raises MsgspecError if it is invalid."""
    return sorted(set(msgspec.json.decode(index, type=_Index).weight_map.values()))
