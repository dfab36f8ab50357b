"""Names of modules, and the sets of them that quantization tools write into a config.

Multimodal checkpoints put a prefix before the names of their text model. Here a module has the name of the text model
alone, such as "model.layers.3.mlp.down_proj", and the entries of a config may have either form.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tandem.engine_core.quantization.name_pattern import NamePattern

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

    exact: Mapping[str, str] = field(default_factory=dict)
    """Entries by the name of the text model."""
    dotted: Mapping[str, str] = field(default_factory=dict)
    """Entries by dot-separated parts of names: those of modules, of their parents, or of either without a prefix."""
    dotted_lengths: frozenset[int] = frozenset()
    """Numbers of components of `dotted`."""
    substrings: Mapping[str, str] = field(default_factory=dict)
    """Entries by parts of names."""
    patterns: tuple[NamePattern, ...] = ()

    @classmethod
    def exactly(cls, entries: Iterable[str]) -> "ModuleNames":
        """Return the set of names, or regular expressions after "re:", as compressed-tensors writes them."""
        names, patterns = _split(entries, lambda entry: entry.startswith("re:"))
        return cls(
            exact={text_model_name(name.removesuffix(_WRAPPER_SUFFIX)): name for name in names},
            patterns=tuple(NamePattern.compile(entry.removeprefix("re:"), entry) for entry in patterns),
        )

    @classmethod
    def below(cls, entries: Iterable[str]) -> "ModuleNames":
        """Return the set of modules and of all below them.

        Entries are dotted parts of names, wildcards with "*", or regular expressions after "re:".
        """
        names, others = _split(entries, lambda entry: entry.startswith("re:") or "*" in entry)
        dotted = {text_model_name(name.removesuffix(_WRAPPER_SUFFIX)).strip("."): name for name in names}
        return cls(
            dotted=dotted,
            dotted_lengths=frozenset(name.count(".") + 1 for name in dotted),
            patterns=tuple(map(_compile_entry, others)),
        )

    @classmethod
    def containing(cls, entries: Iterable[str]) -> "ModuleNames":
        """Return the set of modules whose name contains an entry, as AutoAWQ does."""
        return cls(substrings={text_model_name(entry): entry for entry in entries if entry})

    @classmethod
    def matching(cls, patterns: Iterable[str]) -> "ModuleNames":
        """Return the set of modules that any of the regular expressions matches from the start of their name."""
        return cls(patterns=tuple(NamePattern.compile(pattern, pattern) for pattern in patterns))

    @classmethod
    def searching(cls, pattern: str) -> "ModuleNames":
        """Return the set of modules with a match of a regular expression anywhere in their name, as of AutoRound."""
        return cls(patterns=(NamePattern.compile(pattern, pattern, anywhere=True),))

    def find(self, name: str, stored_as: str | None = None) -> str | None:
        """Return the entry that a module is in, None if it is in none.

        name: of the text model; stored_as: that in the checkpoint, None if unknown.
        """
        if (entry := self.exact.get(name)) is not None:
            return entry
        components = name.split(".") if self.dotted_lengths else []
        for length in self.dotted_lengths:
            for start in range(len(components) - length + 1):
                if (entry := self.dotted.get(".".join(components[start : start + length]))) is not None:
                    return entry
        for part, entry in self.substrings.items():
            # Entries may end with a dot, to exclude "mlp.gate" but not "mlp.gate_proj".
            if part in f"{name}.":
                return entry
        if self.patterns:
            names = tuple(spellings(name))
            # Hundreds of patterns for 20,000 modules take seconds without a fast check that leaves few of them.
            text = "\n".join(names if stored_as is None else (*names, stored_as))
            for pattern in self.patterns:
                if pattern.literal in text and pattern.matches(names, stored_as):
                    return pattern.entry
        return None

    def unmatched(self, names: Mapping[str, str]) -> Iterator[str]:
        """Yield the entries that none of these modules is in.

        names: of modules in the checkpoint, by those of the text model.
        """
        yield from (entry for name, entry in self.exact.items() if name not in names)
        if self.dotted:
            split = [name.split(".") for name in names]
            runs = {
                ".".join(components[start : start + length])
                for components in split
                for length in self.dotted_lengths
                for start in range(len(components) - length + 1)
            }
            yield from (entry for part, entry in self.dotted.items() if part not in runs)
        text = "\n".join([f"{name}." for name in names])
        yield from (entry for part, entry in self.substrings.items() if part not in text)
        spelled = [(tuple(spellings(name)), stored_as) for name, stored_as in names.items()] if self.patterns else []
        texts = ["\n".join((*own, stored_as)) for own, stored_as in spelled]
        for pattern in self.patterns:
            if not any(
                pattern.literal in text and pattern.matches(own, stored_as)
                for text, (own, stored_as) in zip(texts, spelled, strict=True)
            ):
                yield pattern.entry


def _compile_entry(entry: str) -> NamePattern:
    if entry.startswith("re:"):
        return NamePattern.compile(entry.removeprefix("re:"), entry)
    return NamePattern.wildcard(entry)


def _split(entries: Iterable[str], is_pattern: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """Return names and patterns among the entries."""
    names: list[str] = []
    patterns: list[str] = []
    for entry in entries:
        (patterns if is_pattern(entry) else names).append(entry)
    return names, patterns
