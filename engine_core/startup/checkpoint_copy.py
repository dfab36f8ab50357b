"""A private copy of a checkpoint in memory (--swap-copy), which no change of the files reaches.

The engine creates an empty file in memory for each safetensors file of a folder. The process that stages the checkpoint
inherits and fills them, and checks the copy instead of the folder; the engine loads the weights from it.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.error_text import printable
from tandem.engine_core.loader.folder import read_folder
from tandem.engine_core.loader.regular_file import open_regular

CHUNK_BYTES = 2**23
TEMPLATES = "additional_chat_templates"


class CheckpointCopy:
    """A folder with links to files in memory, which the process that made it and its child follow."""

    def __init__(self, folder: TemporaryDirectory[str], descriptors: tuple[int, ...]) -> None:
        self._folder = folder
        self.descriptors = descriptors
        """The files in memory; a child that inherits them by these numbers follows the links too."""

    @classmethod
    def create(cls, source: Path, parent: Path | None) -> "CheckpointCopy":
        """Create empty files for a checkpoint.

        parent: folder for the links; None: that of temporary files. Raises OSError.
        """
        names = sorted(path.name for path in source.iterdir() if path.suffix == ".safetensors")
        folder = TemporaryDirectory(prefix="swap-", dir=parent)
        descriptors: list[int] = []
        try:
            for name in names:
                descriptors.append(os.memfd_create("checkpoint", os.MFD_CLOEXEC))
                Path(folder.name, name).symlink_to(f"/proc/self/fd/{descriptors[-1]}")
        except OSError:
            cls(folder, tuple(descriptors)).close()
            raise
        return cls(folder, tuple(descriptors))

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self._folder.name)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        descriptors, self.descriptors = self.descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)
        self._folder.cleanup()


def fill_copy(source: Path, copy: Path, free_bytes: int) -> Iterator[int]:
    """Copy a checkpoint into the folder of a `CheckpointCopy`; yield the percentage after each chunk.

    Safetensors files that the checkpoint does not consist of are left out. free_bytes: memory that may be taken. Raises
    ConfigError for a checkpoint that needs more, or that changes meanwhile, and OSError.
    """
    sizes = {path: path.stat().st_size for path in read_folder(source)}
    need = sum(sizes.values())
    if need > free_bytes:
        raise ConfigError(
            f"a private copy of {source} takes {need} bytes of memory, {free_bytes} are free; free some, or start the "
            "server without --swap-copy"
        )
    (copy / TEMPLATES).mkdir()
    for path in sorted((*source.iterdir(), *source.glob(f"{TEMPLATES}/*"))):
        if path.suffix in (".json", ".jinja"):
            with open(path, "rb", opener=open_regular) as file, (copy / path.relative_to(source)).open("wb") as made:
                shutil.copyfileobj(file, made)
    for link in copy.glob("*.safetensors"):
        if source / link.name not in sizes:
            link.unlink()
    done = 0
    for path, size in sizes.items():
        for count in _copy_file(path, copy / path.name, size):
            done += count
            yield done * 100 // max(1, need)


def _copy_file(path: Path, link: Path, size: int) -> Iterator[int]:
    """Copy a file of a number of bytes; yield the bytes of each chunk. Raises ConfigError if it changes meanwhile."""
    if not link.is_symlink():
        raise ConfigError(f"{printable(str(path))} has appeared since the copy began; stage the checkpoint again")
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0, opener=open_regular) as file, link.open("r+b", buffering=0) as made:
        before = os.fstat(file.fileno())
        left = size
        while left and (count := file.readinto(buffer[:left])):
            written = 0
            while written < count:
                written += made.write(buffer[written:count])
            left -= count
            yield count
        after = os.fstat(file.fileno())
    if left or after.st_size != size or after.st_mtime_ns != before.st_mtime_ns:
        raise ConfigError(f"{printable(str(path))} has changed while it was copied; stage the checkpoint again")
