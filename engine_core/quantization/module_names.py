"""Names of modules, and the sets of them that quantization tools write into a config.

Multimodal checkpoints put a prefix before the names of their text model. Here a module has the name of the text model
alone, such as "model.layers.3.mlp.down_proj", and the entries of a config may have either form.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import translate

PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head": "lm_head",
    "model.language_model.": "model.",
    "model.lm_head": "lm_head",
}
"""Prefixes of the text model in multimodal checkpoints, mapped to those of the text model alone.

Published folders have the first two; transformers writes the third since 4.52, and `lm_head` unchanged.
"""
_WRAPPER_SUFFIX = ".linear"
"""Suffix in the config of linear layers that the tool wrapped in a module, whose tensors are saved without it."""


def text_model_name(name: str) -> str:
    """Return the name that a module or tensor has in the text model alone."""
    for prefix, own in PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def spellings(name: str) -> Iterator[str]:
    """Yield the name of a module of the text model, and those with the prefixes of multimodal checkpoints."""
    yield name
    for prefix, own in PREFIXES.items():
        if name.startswith(own):
            yield prefix + name.removeprefix(own)


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Names of modules, as a config lists them."""

    exact: frozenset[str] = frozenset()
    """Names of the text model."""
    dotted: frozenset[str] = frozenset()
    """Dot-separated parts of names: those of modules, of their parents, or of either without a prefix."""
    dotted_lengths: frozenset[int] = frozenset()
    """Numbers of components of `dotted`."""
    substrings: tuple[str, ...] = ()
    patterns: tuple[tuple[str, re.Pattern[str]], ...] = ()
    """Entries, and regular expressions that match the start of a name in any of its `spellings`."""

    @classmethod
    def exactly(cls, entries: Iterable[str]) -> "ModuleNames":
        """Return the set of names, or regular expressions after "re:", as compressed-tensors writes them."""
        names, patterns = _split(entries, lambda entry: entry.startswith("re:"))
        return cls(
            exact=frozenset(text_model_name(name.removesuffix(_WRAPPER_SUFFIX)) for name in names),
            patterns=tuple((entry, compile_pattern(entry.removeprefix("re:"), entry)) for entry in patterns),
        )

    @classmethod
    def below(cls, entries: Iterable[str]) -> "ModuleNames":
        """Return the set of modules and of all below them.

        Entries are dotted parts of names, wildcards with "*", or regular expressions after "re:".
        """
        names, others = _split(entries, lambda entry: entry.startswith("re:") or "*" in entry)
        dotted = frozenset(text_model_name(name.removesuffix(_WRAPPER_SUFFIX)).strip(".") for name in names)
        return cls(
            dotted=dotted,
            dotted_lengths=frozenset(name.count(".") + 1 for name in dotted),
            patterns=tuple((entry, _compile_entry(entry)) for entry in others),
        )

    @classmethod
    def containing(cls, entries: Iterable[str]) -> "ModuleNames":
        """Return the set of modules whose name contains an entry, as AutoAWQ does."""
        return cls(substrings=tuple(text_model_name(entry) for entry in entries if entry))

    @classmethod
    def matching(cls, pattern: str) -> "ModuleNames":
        """Return the set of modules that a regular expression matches from the start of their name."""
        return cls(patterns=((pattern, compile_pattern(pattern, pattern)),))

    def find(self, name: str) -> str | None:
        """Return the entry that a module is in, None if it is in none.

        name: of the text model.
        """
        if name in self.exact:
            return name
        components = name.split(".")
        for length in self.dotted_lengths:
            for start in range(len(components) - length + 1):
                part = ".".join(components[start : start + length])
                if part in self.dotted:
                    return part
        for entry in self.substrings:
            # Entries may end with a dot, to exclude "mlp.gate" but not "mlp.gate_proj".
            if entry in f"{name}.":
                return entry
        for entry, pattern in self.patterns:
            if any(pattern.match(spelling) for spelling in spellings(name)):
                return entry
        return None


class PatternError(ValueError):
    """An entry of a config is an invalid regular expression."""


def compile_pattern(pattern: str, entry: str) -> re.Pattern[str]:
    """Compile a regular expression. Raises PatternError, which names the entry, for an invalid one."""
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        raise PatternError(entry) from None


def _compile_entry(entry: str) -> re.Pattern[str]:
    if entry.startswith("re:"):
        return compile_pattern(entry.removeprefix("re:"), entry)
    return re.compile(rf"(?:{translate(entry)})|(?:{translate(entry + '.*')})")


def _split(entries: Iterable[str], is_pattern: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """Return names and patterns among the entries."""
    names: list[str] = []
    patterns: list[str] = []
    for entry in entries:
        (patterns if is_pattern(entry) else names).append(entry)
    return names, patterns
