"""Argument parser of all commands.

`--help` shows common flags, `--help-all` all of them; a usage error is two lines.
"""

import argparse
import copy
import difflib
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tandem.frontend.cli.parsing.config_file import Check, config_words
from tandem.frontend.cli.parsing.foreign_flags import ALIASES, FOREIGN_FLAGS, VALUE_HINTS, Alias, ForeignFlag
from tandem.protocol.engine_options import flag_name
from tandem.protocol.errors import ExitCode

_SIMILAR = 0.8
"""Minimum similarity, from 0 to 1, of a suggested flag."""
_SIMILAR_COMMAND = 0.6
_MODEL_NAMES = frozenset(("model", "model_dir"))
"""Argument names of the model."""


class _HelpFormatter(argparse.HelpFormatter):
    """Wrap descriptions, but not texts with several lines."""

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
    """Parser of a command, or of `tandem` itself. Flags cannot be abbreviated."""

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
        """Initialize with the help flags.

        rare: argument names of flags shown only by `--help-all`. foreign: hints for the flags of another program,
        besides those of other engines. check: returns errors of values, if the `--config` file has other mistakes.
        """
        super().__init__(prog, usage, description, epilog, formatter_class=_HelpFormatter, allow_abbrev=False)
        self._rare = frozenset(rare)
        self._foreign = foreign or {}
        self._aliases: dict[str, Alias] = {}
        self._check = check or (lambda _: ())
        if rare:
            self.add_argument("--help-all", nargs=0, action=_HelpAll, help="show all flags and exit")

    def add_aliases(self, aliases: Mapping[str, Alias]) -> None:
        """Accept aliases of the flags added so far; the help does not list them as flags."""
        for word, alias in aliases.items():
            action = self._option_string_actions.get(alias.ours)
            if action is None:
                continue
            if alias.value is None:
                twin = copy.copy(action)
                twin.option_strings, twin.default, twin.help = [word], argparse.SUPPRESS, argparse.SUPPRESS
                self._add_action(twin)
            else:
                self.add_argument(
                    word,
                    dest=action.dest,
                    action="store_const",
                    const=alias.value,
                    default=argparse.SUPPRESS,
                    help=argparse.SUPPRESS,
                )
            self._aliases[word] = alias

    def format_help(self) -> str:
        """Format the help without rare flags."""
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
            rare = [action for action in self._actions if action.help != argparse.SUPPRESS and action.dest in left_out]
            formatter.add_text(f"{len(rare)} more flags: {self.prog} --help-all")
        elif self._aliases:
            formatter.add_text("\n".join(["names of other engines:", *self._alias_lines()]))
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _alias_lines(self) -> list[str]:
        """List the aliases, a line for each flag."""
        words: dict[Alias, list[str]] = {}
        for word, alias in self._aliases.items():
            words.setdefault(alias, []).append(word)
        return [f"  {alias.meaning:<22}{', '.join(names)}" for alias, names in words.items()]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse a command line.

        Unknown flags are reported before missing arguments. Underscores in a flag are equivalent to dashes.
        """
        given = self._with_dashes(sys.argv[1:] if args is None else list(args))
        from_file = self._words_of_file(given)
        if unknown := self._unknown_flags(given):
            self.error("; ".join(self._explain(flag) for flag in dict.fromkeys(unknown)))
        arguments, rest = super().parse_known_args([*from_file, *given], namespace)
        if self._subparsers is not None:  # its subcommand has done the rest
            return arguments, rest
        if rest:
            words = f"argument{'s' if len(rest) > 1 else ''} {' '.join(rest)}"
            self.error(f"unexpected {words}; the command is {self.usage}")
        if getattr(arguments, "positional_model", None) is not None and _MODEL_NAMES.isdisjoint(self._given(given)):
            # The model of the command line overrides the file's.
            setattr(arguments, "model_dir" if hasattr(arguments, "model_dir") else "model", None)
        return arguments, rest

    def _words_of_file(self, given: Sequence[str]) -> list[str]:
        """Return the arguments from the `--config` file, if given."""
        if "config" not in self._given(given):
            return []
        found = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        found.add_argument("--config", type=Path)
        try:
            path = found.parse_known_args(list(given))[0].config
            return config_words(path, self._option_string_actions, given, self._explain, self._check)
        except (argparse.ArgumentError, ValueError) as error:
            self.error(str(error))

    def _with_dashes(self, words: list[str]) -> list[str]:
        """Spell the flags of this command with dashes, as in `--max_len=8`."""
        known = self._option_string_actions
        end = words.index("--") if "--" in words else len(words)
        for index, word in enumerate(words[:end]):
            flag, equals, value = word.partition("=")
            dashed = flag.replace("_", "-")
            if flag.startswith("--") and flag not in known and dashed in known:
                words[index] = dashed + equals + value
        return words

    def _given(self, words: Sequence[str]) -> set[str]:
        """Return the argument names of the flags on a command line."""
        flags = (self._option_string_actions.get(word.partition("=")[0]) for word in words)
        return {action.dest for action in flags if action is not None}

    def _unknown_flags(self, words: Sequence[str]) -> list[str]:
        """Return the unknown flags on a command line."""
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
        """Return a hint for an unknown flag."""
        known = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        elsewhere: dict[str, ForeignFlag | Alias] = {**FOREIGN_FLAGS, **ALIASES}
        foreign = {
            name: answer for name, answer in elsewhere.items() if (answer.ours or "--device").partition(" ")[0] in known
        } | dict(self._foreign)
        dashed = flag[:2] + flag[2:].replace("_", "-")
        if dashed in foreign:
            return foreign[dashed].explain(flag)
        near = difflib.get_close_matches(dashed, [*known, *foreign], n=1, cutoff=_SIMILAR)
        if not near:
            return f"unknown flag {flag}"
        answer = f" {foreign[near[0]].explain(near[0])}" if near[0] in foreign and near[0] not in self._aliases else ""
        return f"unknown flag {flag}; did you mean {near[0]}?{answer}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if isinstance(action, argparse._SubParsersAction):
                self.error(self._unknown_command(str(value), list(action.choices or ())))
            hint = VALUE_HINTS.get(flag_name(action.dest))
            raise argparse.ArgumentError(action, error.message + (f"; {hint}" if hint else "")) from None

    def _unknown_command(self, word: str, commands: Sequence[str]) -> str:
        """Return the command similar to a word, or all of them."""
        near = difflib.get_close_matches(word, commands, n=1, cutoff=_SIMILAR_COMMAND)
        if near:
            return f"unknown command {word}; did you mean {self.prog} {near[0]}?"
        if "/" in word:
            return f"unknown command {word}; a model is served by {self.prog} serve {word}"
        return f"unknown command {word}; the commands are {', '.join(commands)}"

    def error(self, message: str) -> NoReturn:
        """Exit with two lines: the error, and how to list the flags."""
        every = "--help-all" if self._rare else "--help"
        self.exit(ExitCode.CONFIG, f"{self.prog}: error: {message}\nSee {self.prog} {every}\n")
