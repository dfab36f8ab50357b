"""Explain why a folder has no model that could be served."""

import errno
import os
from pathlib import Path

from tandem.frontend.hub.selection import CONFIG, INDEX, SINGLE, TOKENIZER, TOKENIZER_SOURCES, formats_of
from tandem.protocol.model_folder import read_json

ADAPTER = "adapter_config.json"
_MAX_NAMED = 3
_READ = (
    *(CONFIG, "generation_config.json", TOKENIZER, "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.json", "chat_template.jinja"),
)
"""Optional files that frontends and engine read, besides weights."""
_EFFECTIVE = os.access in os.supports_effective_ids


def explain(folder: Path) -> str:
    """Explain what a folder without a model contains, and what to give instead.

    Return "" for a folder with a config.json, unless it is an adapter's, and for one with a tokenizer, for which the
    engine reports what is missing.
    """
    if (folder / ADAPTER).is_file() and not (folder / SINGLE).is_file() and not (folder / INDEX).is_file():
        return _of_adapter(folder)
    if (folder / CONFIG).is_file():
        return ""
    models = sorted(path.parent for path in folder.glob(f"snapshots/*/{CONFIG}"))
    if models:
        return f"{folder} is a folder of huggingface_hub's cache; give {_hub_name(folder)}{models[-1]}"
    if models := sorted(path.parent for path in folder.glob(f"*/{CONFIG}")):
        named = ", ".join(str(path) for path in models[:_MAX_NAMED])
        more = f" (and {len(models) - _MAX_NAMED} more)" if len(models) > _MAX_NAMED else ""
        return f"{folder} has no {CONFIG}, but folders in it have; give one of them: {named}{more}"
    formats = formats_of(path.name for path in folder.iterdir() if path.name != SINGLE and path.is_file())
    if not formats and (folder / TOKENIZER).is_file():
        return ""
    found = f", and its weights are in a format that is not supported: {', '.join(formats)}" if formats else ""
    return (
        f"{folder} has no {CONFIG}{found}; give a folder in Hugging Face's format, with {CONFIG}, safetensors and "
        "tokenizer, or the name of such a model on the hub"
    )


def check_readable(folder: Path, with_weights: bool) -> None:
    """Raise PermissionError for the first file that this user may not read.

    with_weights: False for a frontend, which does not read weights.
    """
    names = [*_READ, *(() if (folder / TOKENIZER).is_file() else TOKENIZER_SOURCES)]
    if with_weights and (folder / SINGLE).is_file():
        names.append(SINGLE)
    elif with_weights:
        files = read_json(folder / INDEX).get("weight_map")
        names += [INDEX, *sorted({str(name) for name in files.values()} if isinstance(files, dict) else ())]
    for path in (folder / name for name in names):
        if path.is_file() and not os.access(path, os.R_OK, effective_ids=_EFFECTIVE):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def inaccessible(path: Path) -> Path:
    """Return the outermost folder of a path that this user may not enter.

    Return the path itself if there is none.
    """
    for parent in reversed(path.absolute().parents):
        if not os.access(parent, os.X_OK, effective_ids=_EFFECTIVE):
            return parent
    return path


def _of_adapter(folder: Path) -> str:
    base = read_json(folder / ADAPTER).get("base_model_name_or_path")
    of = f" for {base}" if isinstance(base, str) and base.isprintable() else ""
    return (
        f"{folder} holds an adapter (LoRA){of}, and adapters are not supported; merge it into its model with peft: "
        f"AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained('MERGED'), copy "
        "the tokenizer's files next to it and give that folder"
    )


def _hub_name(folder: Path) -> str:
    """Return the hub name of a folder of the hub cache, followed by "or"."""
    kind, _, name = folder.resolve().name.partition("--")
    return f"the model's name, {name.replace('--', '/')}, or " if kind == "models" and name else ""
