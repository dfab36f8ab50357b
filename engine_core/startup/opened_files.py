"""The files of a checkpoint below a root, as they are when they are opened."""

import os
from pathlib import Path

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.error_text import printable
from tandem.engine_core.loader.regular_file import open_regular
from tandem.engine_core.startup.checkpoint_copy import TEMPLATES

READ_SUFFIXES = (".safetensors", ".json", ".jinja")
"""Suffixes of the files that are read."""


def read_files(folder: Path) -> list[Path]:
    """Return the paths in the folder of a checkpoint that are read if they exist."""
    return [
        path for path in sorted((*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*"))) if path.suffix in READ_SUFFIXES
    ]


def check_files(folder: Path) -> None:
    """Check that everything in a folder that may be read is a file that can be opened.

    Raises ConfigError that names a pipe, socket, device, folder, or link to nothing: reading a pipe would never end.
    """
    for path in read_files(folder):
        os.close(_opened(path))


def link_files(folder: Path, root: Path | None, links: Path) -> None:
    """Open the files of a checkpoint, and fill an empty folder with links to what was opened.

    The links lead to descriptors of this process, which stay open: what is read there is what was checked here, even if
    paths of the checkpoint lead elsewhere by then. root: folder below which the files must lie, None for any. Raises
    ConfigError as `check_files`, and for a file that is not below the root.
    """
    base = None if root is None else root.resolve()
    for path in read_files(folder):
        file = f"/proc/self/fd/{_opened(path)}"
        if base is not None and not Path(os.readlink(file)).is_relative_to(base):
            raise ConfigError(f"{printable(str(path))} is not below {base} (--swap-root)")
        link = links / path.relative_to(folder)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(file)


def _opened(path: Path) -> int:
    try:
        return open_regular(str(path))
    except OSError as error:
        raise ConfigError(f"{printable(str(path))} cannot be read: {error.strerror}") from None
