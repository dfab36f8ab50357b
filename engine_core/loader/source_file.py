"""An open file of a checkpoint, from which several threads read at once."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.regular_file import open_regular


class BufferAddressError(ConfigError):
    """The kernel does not read into this memory.

    A sandbox's kernel may refuse pinned memory.
    """


class SourceFile:
    """A file that is open from entry to exit of the context.

    Reads copy from the page cache. A mapping would let the process die by SIGBUS when the file is truncated.
    """

    def __init__(self, path: Path, opener: Callable[[str, int], int] = open_regular) -> None:
        """Open nothing yet. opener: as of `open`."""
        self.path = path
        self._opener = opener
        self._descriptor = -1

    def __enter__(self) -> Self:
        """Open the file. Raises ConfigError if that is not possible."""
        try:
            self._descriptor = self._opener(str(self.path), os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill a buffer of bytes from byte `start` of the file on.

        Raises ConfigError if a read fails or the file ends before, BufferAddressError if another buffer may do.
        """
        done = 0
        while done < len(buffer):
            offset = start + done
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], offset)
            except OSError as error:
                kind = BufferAddressError if error.errno == errno.EFAULT else ConfigError
                raise kind(
                    f"{self.path} cannot be read at byte {offset}: {error.strerror}; check the disk, or download the "
                    "file again"
                ) from None
            if count == 0:
                size = os.fstat(self._descriptor).st_size
                raise ConfigError(
                    f"{self.path} ends at byte {size}, but its header promises more: it was truncated after it was "
                    "opened; download it again"
                )
            done += count


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, to be written."""
    return tensor.view(-1).view(torch.uint8).numpy().data
