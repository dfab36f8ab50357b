"""The safetensors files of a Hugging Face folder.

Headers are read when a checkpoint is opened, tensors one at a time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.slots import SourceSlice, WeightSlot

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The header of one tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Dtype in the words of safetensors, such as "BF16"."""


class _Index(Struct):
    weight_map: dict[str, str]


class Checkpoint:
    """The tensors of a folder, by name."""

    def __init__(self, directory: Path, files: dict[Path, dict[str, StoredTensor]]) -> None:
        """Keep the headers of a folder.

        files: tensors of each file, by name; no name is in two files.
        """
        self.directory = directory
        self.files = files
        self.tensors = {name: tensor for found in files.values() for name, tensor in found.items()}

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Read the headers of a folder's safetensors files.

        The files are `model.safetensors`, or the shards of `model.safetensors.index.json`.

        Raises ConfigError if there is neither, if a shard is missing or corrupt, or if a tensor is in two shards or not
        in the one that the index names.
        """
        if (directory / SINGLE).is_file():
            return cls(directory, {directory / SINGLE: _header(directory / SINGLE)})
        if (directory / INDEX).is_file():
            return cls(directory, _shards(directory))
        raise ConfigError(f"{directory} holds neither {SINGLE} nor {INDEX}; convert other formats to safetensors")

    def read(self, slots: Iterable[WeightSlot]) -> Iterator[tuple[WeightSlot, Tensor]]:
        """Yield each slot that has a tensor here, with the part that it reads.

        Parts are in host memory, and come in the order of the files, one at a time. Raises ConfigError if a file cannot
        be read.
        """
        wanted: dict[str, list[WeightSlot]] = {}
        for slot in slots:
            wanted.setdefault(slot.name, []).append(slot)
        for path, found in self.files.items():
            here = [slot for name in found for slot in wanted.get(name, [])]
            yield from zip(here, _parts(path, [(slot.name, slot.source) for slot in here]), strict=True)

    def read_one(self, name: str) -> Tensor:
        """Return a whole tensor in host memory.

        Raises ConfigError if its file cannot be read.
        """
        path = next(path for path, found in self.files.items() if name in found)
        return next(_parts(path, [(name, None)]))


def _parts(path: Path, parts: list[tuple[str, SourceSlice | None]]) -> Iterator[Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name, source in parts:
                yield file.get_tensor(name) if source is None else file.get_slice(name)[source.index]
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}") from None


def _header(path: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            found = {}
            for name in file.keys():  # noqa: SIM118 (the file is not a mapping)
                header = file.get_slice(name)
                found[name] = StoredTensor(name, tuple(header.get_shape()), header.get_dtype())
            return found
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}") from None


def _shards(directory: Path) -> dict[Path, dict[str, StoredTensor]]:
    path = directory / INDEX
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}") from None
    names = sorted(set(index.values()))
    if bad := [name for name in names if Path(name).name != name]:
        raise ConfigError(f"{path} names files outside its directory: {', '.join(bad)}")
    if absent := [name for name in names if not (directory / name).is_file()]:
        raise ConfigError(f"{path} names files that are missing: {', '.join(absent)}")
    files = {directory / name: _header(directory / name) for name in names}
    problems = []
    holders: dict[str, list[str]] = {}
    for file, found in files.items():
        for name in found:
            holders.setdefault(name, []).append(file.name)
    for name, held in holders.items():
        if len(held) > 1:
            problems.append(f"{name} is in {' and '.join(held)}")
    for name, shard in index.items():
        if shard not in holders.get(name, []):
            problems.append(f"{name} is not in {shard}")
    if problems:
        raise ConfigError(f"{path} does not match its files: {'; '.join(problems)}")
    return files
