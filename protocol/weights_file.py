"""File with the weights that an engine has loaded; an engine that takes its place reads it."""

import os
from pathlib import Path

import msgspec
from msgspec import Struct


class WeightsFile(Struct, frozen=True):
    """The contents of the file."""

    path: str = ""
    """Folder of the checkpoint; "": that of --model."""
    version: str = "0"
    stamp: tuple[tuple[str, int, int, int, int], ...] = ()
    """Name, device, inode, size and time of modification of its files when they were loaded; empty: unknown."""
    highest: int = 0
    """Highest number that a version has had, also of weights that were in memory only."""


def read_weights_file(file: Path) -> WeightsFile:
    """Read the file; without one, the weights are those of --model.

    Raises ValueError if it is damaged, OSError if it cannot be read.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=WeightsFile)
    except FileNotFoundError:
        return WeightsFile()
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file} is damaged: {error}") from None


def write_weights_file(file: Path, contents: WeightsFile) -> None:
    """Write the file: readers find the old contents or the new ones."""
    new = file.with_name(f"{file.name}.new")
    new.write_bytes(msgspec.json.encode(contents))
    os.replace(new, file)
