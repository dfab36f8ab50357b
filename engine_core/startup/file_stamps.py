"""Stamps of files: what tells that they have been replaced or changed on disk."""

import os
from collections.abc import Iterable
from pathlib import Path

from tandem.engine_core.loader.checkpoint import Checkpoint

Stamp = tuple[tuple[str, int, int, int, int], ...]
"""Name, device, inode, size in bytes and time of modification in nanoseconds of each file."""


def folder_stamp(folder: Path) -> Stamp:
    """Return the stamp of the files in a folder that decide its weights; empty if they cannot be read."""
    try:
        return _stamp(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
    except OSError:
        return ()


def weights_stamp(checkpoint: Checkpoint) -> Stamp:
    """Return the stamp of the files with the tensors of a checkpoint; empty if they cannot be read."""
    try:
        return _stamp({checkpoint.directory / tensor.path.name for tensor in checkpoint.tensors.values()})
    except OSError:
        return ()


def _stamp(paths: Iterable[Path]) -> Stamp:
    return tuple([_file_stamp(path.name, path.stat()) for path in sorted(paths)])


def _file_stamp(name: str, found: os.stat_result) -> tuple[str, int, int, int, int]:
    return name, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
