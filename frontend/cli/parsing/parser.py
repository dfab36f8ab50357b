"""The argument parser of every command.

`--help` shows the everyday flags, `--help-all` all of them; a usage error is two lines.
"""

import argparse
import difflib
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tandem.frontend.cli.parsing.config_file import Check, config_words
from tandem.frontend.cli.parsing.foreign_flags import FOREIGN_FLAGS, VALUE_HINTS, ForeignFlag
from tandem.protocol.errors import ExitCode

_SIMILAR = 0.8
"""Least similarity, from 0 to 1, of a flag that is suggested for another."""


_MODEL_FLAGS = frozenset(("--model", "--model-dir"))


def _flags_of(words: Sequence[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


class _HelpFormatter(argparse.HelpFormatter):
    """Wrap descriptions, and leave texts of several lines as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class _HelpAll(argparse.Action):
    """Print the help with all flags and exit."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, CommandParser)
        print(parser.format_all())
        parser.exit()


class CommandParser(argparse.ArgumentParser):
    """Parser of one command, or of `tandem` itself. Flags are never abbreviated."""

    def __init__(
        self,
        prog: str,
        usage: str,
        description: str,
        epilog: str,
        rare: Collection[str] = (),
        foreign: Mapping[str, ForeignFlag] | None = None,
        check: Check | None = None,
    ) -> None:
        """Declare the flags of help.

        rare: names, among the parsed arguments, of the flags that only `--help-all` shows. foreign: answers to the
        flags of another program, besides those of other engines. check: finds what is wrong with values, if the file
        of `--config` has other mistakes.
        """
        super().__init__(prog, usage, description, epilog, formatter_class=_HelpFormatter, allow_abbrev=False)
        self._rare = frozenset(rare)
        self._foreign = foreign or {}
        self._check = check or (lambda _: ())
        if rare:
            self.add_argument("--help-all", nargs=0, action=_HelpAll, help="show all flags and exit")

    def format_help(self) -> str:
        """Format the help without the rare flags."""
        return self._format(self._rare)

    def format_all(self) -> str:
        """Format the help with all flags."""
        return self._format(frozenset())

    def _format(self, left_out: frozenset[str]) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments([action for action in group._group_actions if action.dest not in left_out])
            formatter.end_section()
        if left_out:
            count = sum(action.dest in left_out for action in self._actions)
            formatter.add_text(f"{count} more flags: {self.prog} --help-all")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the words of a command line.

        Flags that this command does not have are refused before anything that is missing.
        """
        given = sys.argv[1:] if args is None else list(args)
        from_file = self._words_of_file(given)
        if unknown := self._unknown_flags(given):
            self.error("; ".join(self._explain(flag) for flag in dict.fromkeys(unknown)))
        arguments, rest = super().parse_known_args([*from_file, *given], namespace)
        if getattr(arguments, "positional_model", None) is not None and _MODEL_FLAGS.isdisjoint(_flags_of(given)):
            # The model of the command line takes the place of the file's.
            setattr(arguments, "model_dir" if hasattr(arguments, "model_dir") else "model", None)
        return arguments, rest

    def _words_of_file(self, given: Sequence[str]) -> list[str]:
        """Return the words of the file that `--config` names, if there is one."""
        if "--config" not in self._option_string_actions or "--config" not in _flags_of(given):
            return []
        found = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        found.add_argument("--config", type=Path)
        try:
            path = found.parse_known_args(list(given))[0].config
            return config_words(path, self._option_string_actions, given, self._explain, self._check)
        except (argparse.ArgumentError, ValueError) as error:
            self.error(str(error))

    def _unknown_flags(self, words: Sequence[str]) -> list[str]:
        """Return the flags among some words that this parser does not have."""
        unknown = []
        for word in words:
            is_flag = word.startswith("-") and word != "-" and " " not in word
            if word == "--" or (self._subparsers is not None and not is_flag):
                break
            if is_flag and self._negative_number_matcher.match(word) is None:
                flag = word.partition("=")[0]
                if flag not in self._option_string_actions:
                    unknown.append(flag)
        return unknown

    def _explain(self, flag: str) -> str:
        """Say what takes the place of a flag that this command does not have."""
        known = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        foreign = {
            name: answer for name, answer in FOREIGN_FLAGS.items()
            if (answer.ours or "--device").partition(" ")[0] in known
        } | dict(self._foreign)  # fmt: skip
        dashed = flag[:2] + flag[2:].replace("_", "-")
        if dashed in foreign:
            return foreign[dashed].explain(flag)
        near = difflib.get_close_matches(dashed, [*known, *foreign], n=1, cutoff=_SIMILAR)
        if not near:
            return f"unknown flag {flag}"
        answer = f" {foreign[near[0]].explain(near[0])}" if near[0] in foreign else ""
        return f"unknown flag {flag}; did you mean {near[0]}?{answer}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hints = (f"; {VALUE_HINTS[flag]}" for flag in action.option_strings if flag in VALUE_HINTS)
            raise argparse.ArgumentError(action, error.message + next(hints, "")) from None

    def error(self, message: str) -> NoReturn:
        """Exit with two lines: what was wrong, and where the flags are listed."""
        every = "--help-all" if self._rare else "--help"
        self.exit(ExitCode.CONFIG, f"{self.prog}: error: {message}\nSee {self.prog} {every}\n")
