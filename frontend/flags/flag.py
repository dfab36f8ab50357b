"""Command-line flags as table rows, with bounds."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from tandem.protocol.engine_options import flag_name, parse_count

MAX_INT32 = 2**31 - 1
MAX_SECONDS = 1e7
COUNT = (1, MAX_INT32)
"""Bounds of a count."""
SECONDS = (0.001, MAX_SECONDS)
"""Bounds of a duration that must be positive."""

_METAVARS: dict[Callable[[str], Any], str] = {int: "N", parse_count: "N", float: "SECONDS", Path: "FILE"}


class Flag(Struct, frozen=True):
    """Command-line flag, with its bounds and the attribute that it sets."""

    name: str
    """Name of the parsed argument; the flag has two leading dashes, and dashes for underscores."""
    group: str
    """Title of the flag's group in the help; empty for the command's own options."""
    help: str
    """One line of help, without the default."""
    parse: Callable[[str], Any] = str
    """Parser of the value. Ignored for flags with choices."""
    bounds: tuple[float, float] | None = None
    """Minimum and maximum; None for flags that are not bounded numbers."""
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    """Name of the value in the help; None for the default of its type: N, SECONDS or FILE."""
    is_everyday: bool = False
    """True for a flag shown by `--help`; `--help-all` shows all."""
    is_repeated: bool = False
    """True for a flag that may be repeated; its values are collected in a list."""
    is_list: bool = False
    """True for a flag with one or more values, collected in a list."""
    is_switch: bool = False
    """True for a flag without a value, which is off by default."""
    default: Any = None
    """Default of the argument; None to use the default of the attribute."""
    default_text: str = ""
    """Description of the default, for the help of flags whose default is None."""
    struct: type[Struct] | None = None
    """Struct with the attribute; None for flags that the command handles itself."""
    field: str = ""
    """Name of the attribute; empty if it is the flag's name."""
    to_field: Callable[[Any], Any] | None = None
    """Conversion from the argument to the attribute; None if they are equal."""
    is_forwarded: bool = True
    """True if a supervisor passes the flag on to its HTTP processes."""

    @property
    def field_name(self) -> str:
        return self.field or self.name

    def get_default(self) -> Any:
        """Return the default of the argument."""
        if self.default is not None or self.struct is None:
            return self.default
        return next(info.default for info in structs.fields(self.struct) if info.name == self.field_name)

    def add_to(self, group: argparse._ActionsContainer) -> None:
        """Add the argument to a parser or one of its groups."""
        default = self.get_default()
        shown = self.default_text or ("" if default is None else f"{default:.10g}" if self.bounds else str(default))
        help_text = f"{self.help} (default: {shown})" if shown else self.help
        name, metavar = flag_name(self.name), self.metavar or _METAVARS.get(self.parse)
        if self.is_repeated:
            group.add_argument(name, action="append", default=default, metavar=metavar, help=help_text)
        elif self.is_list:
            group.add_argument(
                name, nargs="+", action="extend", type=self.parse, default=default, metavar=metavar, help=help_text
            )
        elif self.is_switch:
            group.add_argument(name, action="store_true", default=default, help=f"{self.help} (default: off)")
        elif self.choices is not None:
            group.add_argument(name, choices=self.choices, default=default, help=help_text)
        else:
            group.add_argument(name, type=self.parse, default=default, metavar=metavar, help=help_text)


def add_flags(parser: argparse.ArgumentParser, flags: Iterable[Flag]) -> None:
    """Add flags to a parser, each to its group.

    Missing groups are created.
    """
    groups: dict[str, argparse._ActionsContainer] = {group.title or "": group for group in parser._action_groups}
    groups[""] = parser
    for flag in flags:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        flag.add_to(groups[flag.group])


def out_of_bounds(arguments: argparse.Namespace, flags: Iterable[Flag]) -> list[str]:
    """Return an error message for each number that is out of its flag's bounds.

    Flags that the command lacks are skipped.
    """
    found = []
    for flag in flags:
        value = getattr(arguments, flag.name, None)
        if value is None or flag.bounds is None:
            continue
        low, high = flag.bounds
        if not low <= value <= high:  # also true for NaN
            found.append(f"{flag_name(flag.name)} must be between {low:.10g} and {high:.10g}, not {value}")
    return found
