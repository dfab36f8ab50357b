"""Typed access to the fields of a `quantization_config`."""

from collections.abc import Collection, Mapping
from typing import Any

from tandem.engine_core.errors import ConfigError


class Fields:
    """The fields of one table of config.json, each read once."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        """Store a table.

        where: its path in config.json, for errors, such as "quantization_config".
        """
        self._table = table
        self.where = where

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
        return Fields(value, f"{self.where}.{name}")

    def tables(self, name: str) -> dict[str, "Fields"]:
        """Return the entries of a field that is a table of tables, by name.

        A missing table is empty. Raises ConfigError for anything else.
        """
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self.error(name, "an object")
        inner = Fields(value, f"{self.where}.{name}")
        return {key: inner.table(key) for key in value}

    def with_overrides(self, other: "Fields") -> "Fields":
        """Return these fields, with those of another table in place of the ones that both have."""
        return Fields({**self._table, **other._table}, other.where)

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
        return unsupported(f"{self.where}.{name} is {found}, supported: {expected}")


def unsupported(why: str) -> ConfigError:
    """Return the error of an unsupported quantization."""
    return ConfigError(f"{why}; serve another quantization of the model, or the unquantized checkpoint")


def _quoted(value: object) -> str:
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
