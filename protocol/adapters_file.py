"""File with the adapters of an engine: a supervisor writes the first one, the engine keeps it up to date.

An engine that takes the place of another reads it, so adapters that were loaded at run time are served again.
"""

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from tandem.protocol.events import AdapterFacts


class AdaptersFile(Struct, frozen=True):
    """The contents of the file."""

    adapters: list[AdapterFacts] = []
    next_version: int = 1
    """Number of the next version that is loaded, greater than all before."""
    is_given: bool = False
    """True if the adapters are those of the flags, which no engine has read yet."""

    @classmethod
    def initial(cls, paths: dict[str, str]) -> "AdaptersFile":
        """Return the contents for adapters that no engine has loaded yet, given their folders by name."""
        facts = [AdapterFacts(name, path, version) for version, (name, path) in enumerate(paths.items(), 1)]
        return cls(facts, len(facts) + 1, is_given=True)


def read_adapters(file: Path) -> AdaptersFile:
    """Read the file; it is empty if it does not exist.

    Raises ValueError if it is damaged, OSError if it cannot be read.
    """
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return AdaptersFile()
    try:
        return msgspec.json.decode(data, type=AdaptersFile)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file} is damaged: {error}") from None


def write_adapters(file: Path, contents: AdaptersFile) -> None:
    """Write the file: readers find the old contents or the new ones."""
    new = file.with_name(f"{file.name}.new")
    new.write_bytes(msgspec.json.encode(contents))
    os.replace(new, file)
