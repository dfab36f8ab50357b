"""The open files of an adapter, which are read as they were checked even if their names are changed meanwhile."""

import os
import stat
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tandem.engine_core.errors import ConfigError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE_FILE = "adapter_model.bin"

Stamp = tuple[tuple[int, int, int, int], ...]
"""Device, inode, size and time of change of each file, which differ if they were replaced."""


class AdapterFolder:
    """A folder of an adapter; its files are open from entry to exit of the context."""

    def __init__(self, path: Path, root: Path | None = None) -> None:
        """Open nothing yet. root: folder that the files have to be in, with all links followed; None: any."""
        self.path = path
        self.root = root
        self._descriptors: dict[Path, int] = {}
        self._files = ExitStack()

    def __enter__(self) -> Self:
        """Open the files. Raises ConfigError if one is missing, not a file, or not below the root."""
        with ExitStack() as files:
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                descriptor = self._open(name)
                files.callback(os.close, descriptor)
                self._check(self.path / name, descriptor)
                self._descriptors[self.path / name] = descriptor
            self._files = files.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()
        self._descriptors.clear()

    @property
    def stamp(self) -> Stamp:
        """Stamp of the open files."""
        return tuple([_stamp(os.fstat(descriptor)) for descriptor in self._descriptors.values()])

    def opener(self, path: str, flags: int) -> int:
        """Open one of the files again, as the `opener` of `open` does, even if its name now refers to another."""
        return os.open(f"/proc/self/fd/{self._descriptors[Path(path)]}", flags)

    def _open(self, name: str) -> int:
        path = self.path / name
        try:
            # A pipe would block until somebody writes to it.
            return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            if name == WEIGHTS_FILE and (self.path / _PICKLE_FILE).exists():
                raise ConfigError(
                    f"{self.path} has {_PICKLE_FILE}, a pickle, which may run code; save it as safetensors"
                ) from None
            raise _missing(path) from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None

    def _check(self, path: Path, descriptor: int) -> None:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _missing(path)
        if self.root is not None:
            found = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if not found.is_relative_to(self.root):
                raise ConfigError(f"{path} is not below the folder of adapters (--lora-root) any more")


def file_stamp(folder: Path) -> Stamp:
    """Return the stamp of the files that the names lead to now. Raises ConfigError if one is missing."""
    try:
        return tuple([_stamp((folder / name).stat()) for name in (CONFIG_FILE, WEIGHTS_FILE)])
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from None


def _stamp(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _missing(path: Path) -> ConfigError:
    return ConfigError(f"{path} does not exist, or is not a file; an adapter is a folder in PEFT's format")
