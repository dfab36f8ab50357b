"""A model's folder: files that frontends, supervisor and engine core read."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from tandem.protocol.text_files import decode_text, without_bom

QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files other than config.json in which tools describe a quantization, with the `quant_method` that they imply."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Variables of templates for special tokens."""
_UNSTRETCHED = ("default", "llama3")
"""Kinds of rotary embeddings for which `max_position_embeddings` is the whole number of positions."""


class TemplateFileError(Exception):
    """A file of chat templates or of their settings that cannot be read.

    The text names it and the reason.
    """


class TemplateSource(Struct, frozen=True):
    """The source text of a model's templates."""

    texts: dict[str, str]
    """Source by the template's name: `default`, and optionally `tool_use` for requests with tools."""
    origin: str
    """Name of the file or the built-in template, for error messages."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the texts and their names in hex, whichever files hold them."""
        return hashlib.sha256(msgspec.json.encode(self.texts, order="sorted")).hexdigest()


def find_templates(folder: Path) -> TemplateSource | None:
    """Read the templates of a checkpoint, or return None if it has none.

    They are chat_template.jinja and additional_chat_templates/*.jinja, or else the template in tokenizer_config.json or
    chat_template.json. Raises TemplateFileError.
    """
    texts: dict[str, str] = {}
    if (path := folder / "chat_template.jinja").is_file():
        texts["default"] = read_template(path)
        for other in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            texts[other.stem] = read_template(other)
        return TemplateSource(texts, path.name)
    template = read_settings(folder / "tokenizer_config.json").get("chat_template")
    if template is None:
        template = read_settings(folder / "chat_template.json").get("chat_template")
    if isinstance(template, str):
        texts["default"] = template
    elif isinstance(template, list):
        for entry in template:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                texts[str(entry.get("name"))] = entry["template"]
    return TemplateSource(texts, "tokenizer_config.json") if texts else None


def template_fingerprint(folder: Path) -> str:
    """Return the fingerprint of a checkpoint's templates.

    It is "" if there are none that can be read.
    """
    try:
        source = find_templates(folder)
    except TemplateFileError:
        return ""
    return source.fingerprint if source is not None else ""


def special_tokens(folder: Path) -> dict[str, str]:
    """Read the texts of a checkpoint's special tokens, by the variables of templates.

    Those in tokenizer_config.json come before those in special_tokens_map.json. Raises TemplateFileError.
    """
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        fields = read_settings(folder / file)
        for name in SPECIAL_TOKENS:
            value = fields.get(name)
            # A token is a string, or an object with the key `content`.
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                found[name] = value
    return found


def max_positions(folder: Path) -> int | None:
    """Return the number of positions that config.json states.

    The result is None where it states no number, or where the scaling of the rotary embedding may add to it.
    """
    config = read_json(folder / "config.json")
    config = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else None
    stated = config.get("max_position_embeddings")
    return stated if isinstance(stated, int) and kind in _UNSTRETCHED else None


def read_template(path: Path) -> str:
    """Read the text of a template. Raises TemplateFileError."""
    try:
        return decode_text(path.read_bytes())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise TemplateFileError(f"the chat template {path} cannot be read: {why}") from None


def read_settings(path: Path) -> dict[str, Any]:
    """Read a JSON object that templates need; return {} if the file is missing.

    Without it, a chat model would seem to have no template, or lack its special tokens. Raises TemplateFileError for a
    file that cannot be read, or holds anything else.
    """
    try:
        value = json.loads(path.read_bytes())  # takes NaN and Infinity too, as transformers writes them
        json.dumps(value, ensure_ascii=False).encode()  # and halves of characters, which no text may have
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TemplateFileError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise TemplateFileError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise TemplateFileError(f"{path} does not hold a JSON object; download it again")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    The result is {} if the file is missing or contains anything else.
    """
    try:
        value = msgspec.json.decode(without_bom(path.read_bytes()))
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
