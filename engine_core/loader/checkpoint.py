"""The tensors of a Hugging Face folder.

Headers are read when a checkpoint is opened, tensors when they are asked for.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.error_text import printable
from tandem.engine_core.loader.folder import read_folder
from tandem.engine_core.loader.header import TORCH_DTYPES, StoredTensor
from tandem.engine_core.loader.pieces import cut
from tandem.engine_core.loader.source_file import SourceFile, memory_of

COMPARED_ELEMENTS = 2**21


class Checkpoint:
    """The headers of a folder's tensors, by name."""

    def __init__(self, directory: Path, tensors: dict[str, StoredTensor]) -> None:
        """Keep the headers.

        tensors: by the name that a tensor has in its file, or the one that `renamed` gave it.
        """
        self.directory = directory
        self.tensors = tensors
        self._compared: dict[tuple[str, str], bool] = {}
        """Results of `tensors_differ`: a tied head is compared for the layout of the model, and for its loading."""

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Read the headers of a folder's safetensors files, as `read_folder` does.

        Raises ConfigError if they cannot be read.
        """
        files = read_folder(directory)
        return cls(directory, {name: tensor for found in files.values() for name, tensor in found.items()})

    def renamed(self, rename: Callable[[str], str | None]) -> "Checkpoint":
        """Return the same checkpoint with other names of its tensors.

        rename: returns the new name of a tensor, or None to leave it out. Raises ConfigError if two get the same.
        """
        tensors: dict[str, StoredTensor] = {}
        for tensor in self.tensors.values():
            name = rename(tensor.name)
            if name in tensors:
                other = tensors[name]
                raise ConfigError(
                    f"{self.directory} holds both {printable(other.name)} (in {printable(other.path.name)}) and "
                    f"{printable(tensor.name)} (in {printable(tensor.path.name)}), which are one tensor; remove either"
                )
            if name is not None:
                tensors[name] = tensor
        return Checkpoint(self.directory, tensors)

    def tensors_differ(self, first: str, second: str) -> bool:
        """Return whether the folder holds both tensors and they are not equal.

        They are read in pieces, once for each pair. Raises ConfigError if a file cannot be read.
        """
        if (first, second) not in self._compared:
            self._compared[first, second] = self._compare(first, second)
        return self._compared[first, second]

    def _compare(self, first: str, second: str) -> bool:
        one, other = self.tensors.get(first), self.tensors.get(second)
        if one is None or other is None:
            return False
        if one.shape != other.shape or not {one.dtype, other.dtype} <= TORCH_DTYPES.keys():
            return True
        with ExitStack() as files:
            one_file = files.enter_context(SourceFile(one.path))
            other_file = files.enter_context(SourceFile(other.path))
            for piece in cut(one.shape, None, COMPARED_ELEMENTS):
                left = _read(one_file, one, piece.start, piece.shape)
                right = _read(other_file, other, piece.start, piece.shape)
                if left.dtype != right.dtype:
                    left, right = left.double(), right.double()
                if not torch.equal(left, right):
                    return True
        return False


def read_stored(tensor: StoredTensor) -> Tensor:
    """Read a whole tensor, in host memory. Its dtype must be one of TORCH_DTYPES."""
    with SourceFile(tensor.path) as file:
        return _read(file, tensor, 0, tensor.shape)


def _read(file: SourceFile, tensor: StoredTensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """Read elements of a tensor from element `start` on, in host memory."""
    found = torch.empty(shape, dtype=TORCH_DTYPES[tensor.dtype])
    file.read_into(memory_of(found), tensor.start + start * found.itemsize)
    return found
