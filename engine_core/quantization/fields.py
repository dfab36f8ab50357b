"""Typed access to the fields of a `quantization_config`."""

import re
from collections.abc import Callable, Collection, Mapping
from fnmatch import translate
from typing import Any

from tandem.engine_core.errors import ConfigError

PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.qkv_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.gate_up_proj",
    "mlp.down_proj",
)
"""Names of a layer's linear projections, including those of fused checkpoints."""
_ROOTS = ("model.", "model.language_model.", "language_model.model.")
"""Prefixes of layer names, including those of multimodal checkpoints."""


class Fields:
    """The fields of one table of config.json, each read once."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        """Store a table.

        where: its path in config.json, for errors, such as "quantization_config".
        """
        self._table = table
        self._where = where

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field unchecked, or the default if it is missing or null."""
        value = self._table.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        """Return an integer.

        Raises ConfigError if the field is missing without a default, or not an integer.
        """
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, "an integer")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean.

        Raises ConfigError for anything else.
        """
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def table(self, name: str) -> "Fields":
        """Return a field that is a table.

        Raises ConfigError for anything else.
        """
        value = self.get(name)
        if not isinstance(value, Mapping):
            raise self.error(name, "an object")
        return Fields(value, f"{self._where}.{name}")

    def names(self, *fields: str) -> list[str]:
        """Return the entries of lists of module names.

        A missing list is empty. Raises ConfigError for anything else.
        """
        found: list[str] = []
        for name in fields:
            value = self.get(name, [])
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise self.error(name, "a list of names")
            found += value
        return found

    def expect(self, name: str, allowed: Collection[Any], default: Any = None) -> Any:
        """Return a field that must have one of the given values.

        Raises ConfigError listing them otherwise.
        """
        value = self.get(name, default)
        if value not in allowed:
            raise self.error(name, " or ".join(map(_quoted, allowed)))
        return value

    def error(self, name: str, expected: str) -> ConfigError:
        """Return the error of a field with an unsupported value."""
        found = _quoted(self._table[name]) if name in self._table else "missing"
        return unsupported(f"{self._where}.{name} is {found}, supported is {expected}")


def unsupported(why: str) -> ConfigError:
    """Return the error of an unsupported quantization."""
    return ConfigError(f"{why}; serve another quantization of the model, or the unquantized checkpoint")


def check_unquantized(names: Collection[str], layers: int) -> None:
    """Check the list of modules that a checkpoint leaves unquantized.

    Its entries are names, dotted parts of names, patterns with "*", or regular expressions after "re:".
    All projections of the layers must have one format: raises ConfigError if an entry matches one of them.
    """
    modules = [f"layers.{index}.{projection}" for index in range(layers) for projection in PROJECTIONS]
    for entry in names:
        is_named = _matcher(entry)
        for module in modules:
            if any(is_named(root + module) for root in _ROOTS):
                raise unsupported(
                    f"quantization_config leaves {_quoted(f'model.{module}')} unquantized (entry {_quoted(entry)}); "
                    "all projections of the layers must have one format"
                )


def _matcher(entry: str) -> Callable[[str], bool]:
    """Return a function that tests whether an entry matches a module."""
    if entry.startswith("re:"):
        try:
            pattern = re.compile(entry[3:])
        except re.error:
            raise unsupported(f"quantization_config has an invalid regular expression, {_quoted(entry)}") from None
        return lambda module: pattern.match(module) is not None
    if "*" in entry:
        # The module, or one of its parents.
        whole_or_start = re.compile(rf"(?:{translate(entry)})|(?:{translate(entry + '.*')})")
        return lambda module: whole_or_start.match(module) is not None
    part = f".{entry}."
    return lambda module: part in f".{module}."


def _quoted(value: object) -> str:
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
