"""The adapter_config.json of PEFT: which layers a LoRA adapter changes, and how much.

Adapters come from anyone, so whatever the file asks for that this engine does not do is refused by name.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.error_text import printable
from tandem.engine_core.quantization.module_names import spellings
from tandem.engine_core.quantization.name_pattern import NamePattern, PatternError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CONFIG_BYTES = 2**20
MAX_PATTERNS = 4096
"""Most entries of rank_pattern or alpha_pattern; a model of 80 layers has 560 linear layers."""
ALL_LINEAR = "all-linear"
_CONVERTED = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations that change the base weights too, unless the adapter was converted when it was saved."""
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias of B (lora_bias)",
    "modules_to_save": "modules_to_save",
    "trainable_token_indices": "adapters of embeddings (trainable_token_indices)",
    "target_parameters": "adapters of parameters and experts (target_parameters)",
    "layer_replication": "layer_replication",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "use_qalora": "QA-LoRA",
    "arrow_config": "Arrow (arrow_config)",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
}
"""Fields that must be absent, null, false or empty, and what they ask for."""
_KNOWN = {
    *("peft_type", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "r"),
    *("target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "bias", "use_rslora", "init_lora_weights"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_config", "megatron_core"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config", "qalora_group_size"),
    *("peft_version", "ensure_weight_tying"),
}
"""Further fields; those that `PeftConfig` does not have matter to training only."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields of a LoRA adapter, checked."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    """True for rsLoRA (Kalajdzievski, 2023): scaled by 1 / sqrt(rank) in place of 1 / rank."""
    targets: Callable[[str], bool]
    """Return whether the adapter changes a module, by its name in the text model."""
    target_names: tuple[str, ...]
    """The entries of target_modules if it is a list, each of which must match a module."""
    own_rank: Callable[[str], int | None]
    """Return the rank of a module in rank_pattern, None for one that no key names."""
    own_alpha: Callable[[str], float | None]
    """Return the alpha of a module in alpha_pattern, None for one that no key names."""

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's matrices."""
        own = self.own_rank(module)
        return self.rank if own is None else own

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's update."""
        rank, own = self.rank_of(module), self.own_alpha(module)
        return (self.alpha if own is None else own) / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def read_config(path: Path, opener: Callable[[str, int], int] | None = None) -> PeftConfig:
    """Read the configuration of an adapter. opener: as of `open`.

    Raises ConfigError for a file that is missing or malformed, and by name for whatever is not supported.
    """
    fields = _read_object(path, opener)
    try:
        return _parse(fields)
    except _FieldError as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: a value is nested too deeply") from None


class _FieldError(Exception):
    """A field has a value that is malformed or not supported; the text describes how."""


def _read_object(path: Path, opener: Callable[[str, int], int] | None) -> dict[str, Any]:
    try:
        with open(path, "rb", opener=opener) as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise ConfigError(
                f"{path} has more than {MAX_CONFIG_BYTES} bytes; it cannot be the configuration of an adapter"
            )
        fields = json.loads(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {printable(str(error))}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return fields


def _parse(fields: dict[str, Any]) -> PeftConfig:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise _FieldError(f"peft_type is {_shown(kind)}; only LORA is supported")
    for name, what in _REFUSED.items():
        if fields.get(name):
            raise _FieldError(f"{what} is not supported; train the adapter without it")
    if fields.get("bias", "none") not in ("none", None):
        raise _FieldError(f"bias is {_shown(fields['bias'])}; it must be none")
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CONVERTED):
        raise _FieldError(
            f"init_lora_weights is {_shown(start)}, which changes the base weights; convert the adapter to plain LoRA "
            "when saving it (path_initial_model_for_weight_conversion)"
        )
    unknown = sorted(name for name in fields.keys() - _KNOWN - _REFUSED.keys() if fields[name])
    switches = [name for name in unknown if name.startswith("use_")]
    if switches:
        raise _FieldError(f"{list_names(switches)} is not known; such a field of PEFT chooses another computation")
    if unknown:
        logger.warning("fields of an adapter that are not known and not used: %s", printable(", ".join(unknown)))
    rank, alpha = _rank(fields.get("r", 8), "r"), _alpha(fields.get("lora_alpha", 8), "lora_alpha")
    stabilized = fields.get("use_rslora")
    if not isinstance(stabilized, bool | None):
        raise _FieldError(f"use_rslora is {_shown(stabilized)}; it must be true or false")
    targets, names = _targets(fields)
    ranks, alphas = _pattern(fields, "rank_pattern", _rank), _pattern(fields, "alpha_pattern", _alpha)
    return PeftConfig(rank, alpha, bool(stabilized), targets, names, ranks, alphas)


def _targets(fields: dict[str, Any]) -> tuple[Callable[[str], bool], tuple[str, ...]]:
    """Return the test for modules that the adapter changes, and the entries of target_modules."""
    wanted, excluded = fields.get("target_modules"), fields.get("exclude_modules") or []
    if not wanted or not isinstance(wanted, str | list):
        raise _FieldError(f"target_modules is {_shown(wanted)}; it must be a list of modules, a pattern or all-linear")
    includes, excludes = _matcher(wanted, "target_modules"), _matcher(excluded, "exclude_modules")
    layers = fields.get("layers_to_transform")
    if layers is not None:
        layers = _layers(layers)
    names = () if isinstance(wanted, str) else tuple(wanted)

    def is_target(module: str) -> bool:
        known_as = tuple(spellings(module))
        if not any(map(includes, known_as)) or any(map(excludes, known_as)):
            return False
        return layers is None or any(int(part) in layers for part in module.split(".") if part.isdecimal())

    return is_target, names


def _layers(value: Any) -> frozenset[int]:
    found = value if isinstance(value, list) else [value]
    if not found or not all(type(layer) is int and layer >= 0 for layer in found):
        raise _FieldError(f"layers_to_transform is {_shown(value)}; it must be a layer's index or a list of them")
    return frozenset(found)


def _matcher(value: Any, field: str) -> Callable[[str], bool]:
    """Return the test of PEFT for names: a pattern of the whole name, or a list of last components."""
    if isinstance(value, str):
        if value == ALL_LINEAR:
            return bool
        pattern = _compiled(value, field)
        return lambda module: pattern.fullmatch(module) is not None
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise _FieldError(f"{field} is {_shown(value)}; it must be a list of names, or a pattern")
    names, ends = frozenset(value), tuple(f".{name}" for name in value)
    return lambda module: module in names or module.endswith(ends)


def _compiled(pattern: str, field: str) -> re.Pattern[str]:
    try:
        return NamePattern.compile(pattern, field).regex
    except PatternError:
        raise _FieldError(
            f"{field} has {_shown(pattern)}, which is not a regular expression, or one that may take too long to match"
        ) from None


def _pattern(fields: dict[str, Any], name: str, parse: Callable[[Any, str], T]) -> Callable[[str], T | None]:
    """Return the look-up of modules in an object of numbers by pattern, the first of which counts.

    As in PEFT, a pattern names a module by its last components, or from the start with ^. The patterns are compiled
    once: files have one for each module, more than `re` keeps.
    """
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise _FieldError(f"{name} is {_shown(value)}; it must be an object of numbers by module")
    if len(value) > MAX_PATTERNS:
        raise _FieldError(f"{name} has {len(value)} entries, at most {MAX_PATTERNS} are supported")
    patterns = [(_compiled(rf"(.*\.)?({key})", name), parse(own, f"{name}[{key[:100]}]")) for key, own in value.items()]

    @cache
    def find(module: str) -> T | None:
        known_as = tuple(spellings(module))
        return next((own for pattern, own in patterns if any(map(pattern.fullmatch, known_as))), None)

    return find


def _rank(value: Any, name: str) -> int:
    if type(value) is not int or value < 1:
        raise _FieldError(f"{printable(name)} is {_shown(value)}; a rank is a whole number from 1 on")
    return value


def _alpha(value: Any, name: str) -> float:
    try:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass  # An integer that no float holds.
    raise _FieldError(f"{printable(name)} is {_shown(value)}; it must be a finite number")


def _shown(value: Any) -> str:
    return printable(repr(value)[:200])


def list_names(names: Iterable[str], most: int = 3) -> str:
    """Return the first names of several, for a message."""
    found = sorted(names)
    return printable(", ".join(found[:most])) + (f" and {len(found) - most} more" if len(found) > most else "")
