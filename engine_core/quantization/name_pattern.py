"""Patterns of module names that configs contain: regular expressions and wildcards.

A config.json is untrusted: expressions that may take exponential time to match are refused.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import translate
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

MAX_LENGTH = 4096
"""Maximum number of characters of a pattern."""
MAX_REPEATS = 4
"""Maximum number of repeats of variable length in a row, but for those of digits: matching takes time in the power of
it, 1 ms for a name of usual length."""
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
_WRAPPER = "language_model"
"""Part of the names that multimodal checkpoints put before those of the text model."""


class PatternError(ValueError):
    """An entry of a config is a regular expression that is invalid, or takes too long to match."""


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A pattern of module names, by the entry of the config."""

    entry: str
    regex: re.Pattern[str]
    literal: str
    """Text that each name in the pattern contains, for a faster check than by the regex."""
    is_negative: bool
    """True if it has lookarounds that must not match, so that it matches any name that differs enough."""
    anywhere: bool

    @classmethod
    def compile(cls, pattern: str, entry: str, anywhere: bool = False) -> "NamePattern":
        """Compile a regular expression.

        anywhere: True if a match may start after the start of a name. Raises PatternError, which names the entry, for
        an expression that is invalid or may take exponential time.
        """
        try:
            if len(pattern) > MAX_LENGTH:
                raise PatternError
            parsed = _parser.parse(pattern)
            if _repeats(parsed) > MAX_REPEATS:
                raise PatternError
            ignores_case = parsed.state.flags & re.IGNORECASE
            literal = "" if ignores_case else max(_literals(parsed), key=len, default="")
            return cls(entry, re.compile(pattern), literal, "(?!" in pattern or "(?<!" in pattern, anywhere)
        except (PatternError, re.error, RecursionError, OverflowError):
            raise PatternError(entry) from None

    @classmethod
    def wildcard(cls, entry: str) -> "NamePattern":
        """Compile a wildcard pattern of modules, which holds for those below them too."""
        literal = max(re.split(r"[*?\[\]]", entry), key=len)
        below = "" if entry.endswith("*") else rf"|(?:{translate(entry + '.*')})"
        return cls(entry, re.compile(rf"(?:{translate(entry)}){below}"), literal, False, False)

    def matches(self, spellings: tuple[str, ...], stored_as: str | None) -> bool:
        """Return whether a module is in the pattern.

        spellings: names of the module with and without prefixes, that of the text model first; stored_as: that in the
        checkpoint, None if unknown.

        An entry may have another prefix than the checkpoint. But "all but the text model" must not match the text
        model by a prefix that the checkpoint does not have.
        """
        if self.is_negative:
            return all(map(self._match, spellings if stored_as is None else (stored_as,)))
        if stored_as is not None and self._match(stored_as):
            return True
        return any(map(self._match, spellings if _WRAPPER in self.entry else spellings[:1]))

    def _match(self, name: str) -> bool:
        found = self.regex.search(name) if self.anywhere else self.regex.match(name)
        return found is not None


def _literals(parsed: Any) -> Iterator[str]:
    """Yield texts that each match of a parsed expression contains."""
    run = ""
    for operator, argument in parsed:
        if operator is _constants.LITERAL:
            run += chr(argument)
            continue
        yield run
        run = ""
        if operator is _constants.SUBPATTERN and not argument[1] & re.IGNORECASE:
            yield from _literals(argument[3])
    yield run


def _repeats(parsed: Any) -> int:
    """Return the number of repeats of variable length in a row of a parsed expression.

    Raises PatternError for a repeat of alternatives or of a part of variable length.
    """
    count = 0
    for operator, argument in parsed:
        if operator in _REPEATS:
            low, high, inner = argument
            inner_low, inner_high = inner.getwidth()
            if high > 1 and (inner_low != inner_high or _has_branch(inner)):
                raise PatternError
            count += max(int(low != high and not _is_digits(inner)), _repeats(inner))
        elif operator is _constants.BRANCH:
            count += max(map(_repeats, argument[1]))
        else:
            count += sum(map(_repeats, _parts(argument)))
    return count


def _is_digits(parsed: Any) -> bool:
    """Return whether an expression matches a digit; names have few digits in a row."""
    digits = ((_constants.CATEGORY, _constants.CATEGORY_DIGIT), (_constants.RANGE, (48, 57)))
    return any(list(parsed) == [(_constants.IN, [digit])] for digit in digits)


def _has_branch(parsed: Any) -> bool:
    return any(
        operator is _constants.BRANCH or any(map(_has_branch, _parts(argument))) for operator, argument in parsed
    )


def _parts(argument: Any) -> list[Any]:
    """Return the expressions among the arguments of an operator."""
    found = argument if isinstance(argument, (tuple, list)) else (argument,)
    return [part for part in found if isinstance(part, _parser.SubPattern)]
