"""The safetensors files of a Hugging Face folder: which tensors there are, and reading one at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.engine_core.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, not read yet."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors calls it, such as "BF16"."""


class _Index(Struct):
    weight_map: dict[str, str]


class Checkpoint:
    """All tensors of a folder, by name."""

    def __init__(self, files: dict[Path, dict[str, StoredTensor]]) -> None:
        self.files = files
        self.tensors = {name: tensor for found in files.values() for name, tensor in found.items()}

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Reads the headers. Format: `model.safetensors`, or the shards of `model.safetensors.index.json`.

        Raises ConfigError if there is neither, if a shard is missing or corrupt, if a tensor is in two shards or not
        in the one that the index names, or if one is of a dtype that is not read (such as that of a quantized model).
        """
        if (directory / SINGLE).is_file():
            files = {directory / SINGLE: _header(directory / SINGLE)}
        elif (directory / INDEX).is_file():
            files = _shards(directory)
        else:
            raise ConfigError(f"{directory} holds neither {SINGLE} nor {INDEX}; other formats are not read")
        stored = [tensor for found in files.values() for tensor in found.values()]
        if odd := [f"{tensor.name} is {tensor.dtype}" for tensor in stored if tensor.dtype not in DTYPES]:
            raise ConfigError(f"{directory}: only {', '.join(DTYPES)} tensors are read, but {'; '.join(odd)}")
        return cls(files)

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, one at a time, in host memory. Raises ConfigError if a file cannot be read."""
        for path, found in self.files.items():
            yield from _tensors(path, list(found))

    def read_one(self, name: str) -> Tensor:
        """One tensor, in host memory. Raises ConfigError if its file cannot be read."""
        path = next(path for path, found in self.files.items() if name in found)
        return next(_tensors(path, [name]))[1]


def _tensors(path: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in names:
                yield name, file.get_tensor(name)
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
        raise ConfigError(f"{path} names files outside its folder: {', '.join(bad)}")
    if absent := [name for name in names if not (directory / name).is_file()]:
        raise ConfigError(f"{path} names files that are not there: {', '.join(absent)}")
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
