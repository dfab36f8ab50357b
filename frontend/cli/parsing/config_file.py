"""Read flags of a command from a TOML file, for `--config FILE`.

Names are those of flags without leading dashes; dashes and underscores are equivalent. Flags of the command line take
precedence.
"""

import argparse
import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.protocol.text_files import decode_text

NOT_IN_FILES = frozenset(("config", "check", "help", "help_all", "listener_fds", "slot", "supervisor_fd"))
"""Argument names of flags that a file must not have."""
SECRETS = frozenset(("api_key", "hf_token"))
"""Argument names of flags with values that messages must not quote."""
_NO_TABLE = "{} is a table; name flags without tables"
_SIMILAR = 0.6
_MAX_SHOWN = 60

Explain = Callable[[str], str]
"""Function that returns a hint for an unknown flag."""

Check = Callable[[argparse.Namespace], Iterable[str]]
"""Function that returns error messages for parsed arguments of a command, some of which may be missing."""


def config_words(
    path: Path, flags: Mapping[str, argparse.Action], given: Sequence[str], explain: Explain, check: Check
) -> list[str]:
    """Convert a file to command-line arguments.

    flags: the flags of the command, by their spelling. given: the command line, whose flags are skipped. Raises
    ValueError for an unreadable file, and for all unknown names and values of a wrong type, with a line for each that
    has the line number in the file. Errors of `check` for the other values follow, so that all mistakes are reported at
    once.
    """
    values = argparse.Namespace()
    words: list[str] = []
    mistakes: list[tuple[str, str]] = []
    seen: dict[str, str] = {}
    overridden = {flags[flag].dest for word in given if (flag := word.partition("=")[0]) in flags}
    text = _read(path)
    for name, value in _parse(path, text).items():
        flag = "--" + name.replace("_", "-")
        action = flags.get(flag)
        if action is None or action.dest in NOT_IN_FILES:
            is_table = isinstance(value, dict)
            mistakes.append((name, _NO_TABLE.format(name) if is_table else _unknown(name, flag, flags, explain)))
            continue
        if action.dest in seen:
            mistakes.append((name, f"{seen[action.dest]} and {name} are the same flag; leave one out"))
            continue
        seen[action.dest] = name
        try:
            new = _words(name, flag, action, value)
        except ValueError as error:
            mistakes.append((name, str(error)))
            continue
        if action.dest not in overridden:
            words += new
            if not isinstance(value, list):
                setattr(values, action.dest, action.type(str(value)) if callable(action.type) else value)
    if mistakes:
        lines = _lines_of_names(text)
        errors = [f"{path}:{lines[name]}: {text}" for name, text in mistakes]
        raise ValueError("\n".join([*errors, *(f"{path}: {problem}" for problem in check(values))]))
    return words


def _read(path: Path) -> str:
    try:
        return decode_text(path.read_bytes())
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # encoding error
        raise ValueError(f"--config {path} is not TOML: {error}") from None


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"--config {path} is not TOML: {error}") from None


def _lines_of_names(text: str) -> dict[str, int]:
    """Return the line number of each top-level name of a TOML file, counted from 1.

    `tomllib` does not report it. A statement ends at the first line at which it is valid TOML by itself.
    """
    found: dict[str, int] = {}
    statement, begin, in_table = "", 1, False
    for number, line in enumerate(text.split("\n"), 1):
        statement += line + "\n"
        try:
            names = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        is_header = statement.lstrip().startswith("[")
        in_table = in_table or is_header
        for name in names if is_header or not in_table else ():
            found.setdefault(name, begin)
        statement, begin = "", number + 1
    return found


def _unknown(name: str, flag: str, flags: Mapping[str, argparse.Action], explain: Explain) -> str:
    reason = explain(flag)
    if not reason.startswith("unknown flag"):
        return re.sub(r"--(?=[a-z])", "", reason)  # another server's flag, and its name here in a file
    known = [word.removeprefix("--") for word, action in flags.items() if action.dest not in NOT_IN_FILES]
    near = difflib.get_close_matches(flag.removeprefix("--"), known, n=1, cutoff=_SIMILAR)
    return f"unknown name {name}" + (f"; did you mean {near[0]}?" if near else "")


def _words(name: str, flag: str, action: argparse.Action, value: Any) -> list[str]:
    """Return the command-line arguments of a flag.

    Raises ValueError for an invalid value.
    """
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, not {_shown(value, action)}")
        return [flag] if value else []
    is_list = action.nargs == "+" or isinstance(action, argparse._AppendAction)
    if isinstance(value, list) and not is_list:
        raise ValueError(f"{name} must be one value, not a list")
    values = value if isinstance(value, list) else [value]
    return [f"{flag}={_text(name, action, one)}" for one in values]


def _text(name: str, action: argparse.Action, value: Any) -> str:
    kind = action.type
    if isinstance(value, bool) and action.choices is not None and set(action.choices) == {"on", "off"}:
        return "on" if value else "off"
    if kind is int and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError(f"{name} must be an integer, not {_shown(value, action)}")
    if kind is float and (not isinstance(value, int | float) or isinstance(value, bool)):
        raise ValueError(f"{name} must be a number, not {_shown(value, action)}")
    if kind in (None, str, Path) and not isinstance(value, str):
        raise ValueError(f"{name} must be a string, not {_shown(value, action)}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{name} must be a string or a number, not {_shown(value, action)}")
    parsed: Any = value
    if callable(kind):
        try:
            parsed = kind(str(value))
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from None
    if action.choices is not None and parsed not in action.choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, action.choices))}, not {_shown(value, action)}")
    return str(value)


def _shown(value: Any, action: argparse.Action) -> str:
    if isinstance(value, dict):
        return "a table"
    if action.dest in SECRETS:
        return "a value without quotes"
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
