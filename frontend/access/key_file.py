"""File of API keys, in TOML.

It has a table `[[key]]` for each key, with name, digest, rights and limits.
"""

import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

from tandem.frontend.access.api_key import NO_KEY, ApiKey, KeyLimits, Right
from tandem.protocol.commands import MAX_PRIORITY
from tandem.protocol.text_files import decode_text

MAX_COUNT = 2**31 - 1
"""Maximum value of a limit."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_UNNAMED = re.compile(r"key-[0-9a-f]{8}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_FIELDS = ("name", "sha256", "rights", "max_concurrent", "tokens_per_minute", "max_priority")
_OWNER = "@"
"""First character of a named owner of stored responses, which digests do not have."""


class KnownKeys:
    """Keys of the tables read so far.

    Digests are unique, and keys of one name have the same rights and limits.
    """

    def __init__(self) -> None:
        self.keys: list[ApiKey] = []
        self._digests: dict[bytes, tuple[int, ApiKey]] = {}
        """Table number and key, by digest."""
        self._names: dict[str, tuple[int, ApiKey]] = {}
        """Table number and key, by name; the first key of each name."""

    def add(self, key: ApiKey, number: int) -> None:
        """Append the key of a table. Raises ValueError if it conflicts with another one."""
        if key.digest in self._digests:
            table, other = self._digests[key.digest]
            raise ValueError(f"sha256 is that of table {table} ({other.name!r}) too; remove one of them")
        self._digests[key.digest] = number, key
        table, other = self._names.setdefault(key.name, (number, key))
        if (key.rights, key.limits) != (other.rights, other.limits):
            raise ValueError(f"table {table} has the same name with other rights or limits; make them equal")
        self.keys.append(key)


def load_key_file(path: Path) -> list[ApiKey]:
    """Read the keys of a file.

    Keys of one name must have the same rights and limits. Raises ValueError, with the file, the table number and a
    remedy, for a file that is unreadable, writable by others or malformed.
    """
    try:
        # Opening a pipe would block until it has a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            _check_mode(path, os.fstat(file.fileno()).st_mode)
            tables = _tables(tomllib.loads(decode_text(file.read())))
    except FileNotFoundError:
        raise ValueError(
            f"--api-keys {path} does not exist; run tandem api-key NAME >> {path}, or name another file"
        ) from None
    except PermissionError:
        user = f"the user with the id {os.geteuid()}"
        raise ValueError(
            f"--api-keys {path} cannot be read by {user}: Permission denied; let it read the file"
        ) from None
    except OSError as error:
        raise ValueError(f"--api-keys {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-keys {path} is not valid TOML: {error}") from None
    except ValueError as error:
        raise ValueError(f"--api-keys {path}: {error}") from None
    known = KnownKeys()
    for number, table in enumerate(tables, 1):
        try:
            known.add(_key(table), number)
        except ValueError as error:
            raise ValueError(f"--api-keys {path}: [[key]] table {number}{_described(table)}: {error}") from None
    return known.keys


def key_table(key: ApiKey) -> str:
    """Parse the table of a key."""
    limits = key.limits
    lines = ["[[key]]", f'name = "{key.name}"', f'sha256 = "{key.digest.hex()}"']
    rights = [f'"{right}"' for right in Right if right in key.rights]
    lines.append(f"rights = [{', '.join(rights)}]")
    for name, value in (("max_concurrent", limits.max_concurrent), ("tokens_per_minute", limits.tokens_per_minute)):
        lines += [] if value is None else [f"{name} = {value}"]
    lines += [f"max_priority = {limits.max_priority}"] if limits.max_priority else []
    return "\n".join(lines) + "\n"


def check_name(name: object) -> str:
    """Return the name of a key.

    Raises ValueError for an invalid name.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ValueError(
            f"name is {name!r:.100}; use 1 to 64 letters, digits, '.', '_' and '-', and a letter or digit as the first"
        )
    if _UNNAMED.fullmatch(name):
        raise ValueError(f"name {name!r} is kept for keys of --api-key; choose another")
    return name


def _check_mode(path: Path, mode: int) -> None:
    """Raise ValueError for a file that other users may write, since they could add keys."""
    if not stat.S_ISREG(mode):
        raise ValueError("it is not a regular file")
    mode = stat.S_IMODE(mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"its mode {mode:04o} lets other users write it; run chmod go-w {path}")


def _tables(document: dict[str, Any]) -> list[dict[str, Any]]:
    if unknown := [name for name in document if name != "key"]:
        raise ValueError(f"{unknown[0]!r} is not known; the file has tables [[key]] only")
    tables = document.get("key")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError("it has no [[key]] table; `tandem api-key NAME` prints one")
    return tables


def _described(table: dict[str, Any]) -> str:
    name = table.get("name")
    return f" (name {name!r:.100})" if isinstance(name, str) else ""


def _key(table: dict[str, Any]) -> ApiKey:
    if unknown := [name for name in table if name not in _FIELDS]:
        raise ValueError(f"the field {unknown[0]!r} is not known; use {', '.join(_FIELDS)}")
    if missing := [name for name in ("name", "sha256") if name not in table]:
        raise ValueError(f"{missing[0]} is missing; `tandem api-key NAME` prints a whole table")
    name = check_name(table["name"])
    digest = table["sha256"]
    if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
        raise ValueError("sha256 must be the SHA-256 of the key in 64 hex digits, not the key itself")
    if bytes.fromhex(digest) == NO_KEY:
        raise ValueError("sha256 is that of an empty text; `tandem api-key NAME` prints a whole table")
    limits = KeyLimits(
        _number(table, "max_concurrent", 1, MAX_COUNT, None),
        _number(table, "tokens_per_minute", 1, MAX_COUNT, None),
        _number(table, "max_priority", -MAX_PRIORITY, MAX_PRIORITY, 0) or 0,
    )
    return ApiKey(name, bytes.fromhex(digest), _rights(table), limits, _OWNER + name)


def _rights(table: dict[str, Any]) -> frozenset[Right]:
    rights = table.get("rights", [Right.GENERATE])
    known = ", ".join(f'"{right}"' for right in Right)
    if not isinstance(rights, list) or not rights:
        raise ValueError(f"rights must be a list of at least one of {known}")
    for right in rights:
        if right not in list(Right):
            raise ValueError(f"rights has {right!r:.100}; use {known}")
    return frozenset(map(Right, rights))


def _number(table: dict[str, Any], name: str, low: int, high: int, default: int | None) -> int | None:
    value = table.get(name, default)
    if value is not default and (type(value) is not int or not low <= value <= high):
        raise ValueError(f"{name} is {value!r:.100}; give a whole number from {low} to {high}, or leave it out")
    return value
