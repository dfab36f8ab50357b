"""Sampling defaults from a checkpoint's generation_config.json."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tandem.protocol.params import SAMPLING_FIELDS
from tandem.protocol.text_files import without_bom

logger = logging.getLogger(__name__)

CONFIG_NAME = "generation_config.json"


def load_sampling_defaults(model_dir: Path) -> Mapping[str, float]:
    """Return the defaults of request fields, by name.

    They are the sampling parameters in generation_config.json, in the format of Hugging Face transformers;
    `"do_sample": false` is temperature 0. Empty without such a file. Invalid values are skipped with a warning.
    """
    path = model_dir / CONFIG_NAME
    if not path.is_file():
        return {}
    try:
        config = msgspec.json.decode(without_bom(path.read_bytes()), type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError, OSError) as error:
        logger.warning("%s is not used for sampling defaults: %s", path, error)
        return {}
    if config.get("do_sample") is False:
        config["temperature"] = 0.0
    found: dict[str, float] = {}
    for field in SAMPLING_FIELDS:
        value = config.get(field.name)
        if value is None or (field.name == "top_k" and value == -1):
            continue
        if not _is_number(value) or not field.accepts(value) or (field.is_integer and value % 1):
            bounds = field.describe_bounds()
            logger.warning("%s: %s is %.80r and not used; it must be a number, %s", path, field.name, value, bounds)
        elif value != field.neutral:
            found[field.name] = int(value) if field.is_integer else float(value)
    if found:
        shown = ", ".join(f"{name} {value:g}" for name, value in found.items())
        logger.info("sampling defaults of %s: %s", CONFIG_NAME, shown)
    return found


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
