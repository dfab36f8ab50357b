"""The files of a model folder that hold its tensors.

They may be symlinks, as in the Hugging Face cache, but an index names only files in its own folder.
"""

from pathlib import Path

import msgspec
from msgspec import Struct

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.error_text import list_faults, printable
from tandem.engine_core.loader.header import LFS_MARK, StoredTensor, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 2**25
PICKLES = (".bin", ".pt", ".pth", ".ckpt")

Files = dict[Path, dict[str, StoredTensor]]
"""The tensors of each file, by name."""


class _Index(Struct):
    weight_map: dict[str, str]


def read_folder(directory: Path) -> Files:
    """Read the headers of a folder's safetensors files.

    The files are `model.safetensors`, or the shards of `model.safetensors.index.json`, or else the only one there is.
    No name is in two files.

    Raises ConfigError if the folder or its files are missing, if a shard is missing or corrupt, or if a tensor is in
    two shards or not in the one that the index names.
    """
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: read_header(directory / SINGLE)}
    if (directory / INDEX).is_file():
        return _shards(directory)
    if not directory.exists():
        raise ConfigError(f"the folder {directory} does not exist")
    found = sorted(path for path in directory.glob("*.safetensors") if path.is_file())
    if len(found) == 1:
        return {found[0]: read_header(found[0])}
    raise ConfigError(f"{directory} has neither {SINGLE} nor {INDEX}{_remedy(directory, found)}")


def stored_dtypes(directory: Path) -> dict[str, str | None] | None:
    """Return the dtype of each tensor of a folder, in the words of safetensors, by name.

    Of shards only the index is read, and the dtypes are None. None if the folder has no weights. Raises ConfigError as
    `read_folder` does.
    """
    if not (directory / SINGLE).is_file():
        if (directory / INDEX).is_file():
            return dict.fromkeys(_read_index(directory / INDEX))
        if not any(directory.glob("*.safetensors")):
            return None
    return {name: tensor.dtype for found in read_folder(directory).values() for name, tensor in found.items()}


def _remedy(directory: Path, safetensors: list[Path]) -> str:
    """Explain what a folder contains instead of loadable weights."""
    if safetensors:
        others = ", ".join(printable(path.name) for path in safetensors[:3])
        return f", but {len(safetensors)} other safetensors files ({others}); download the index too"
    names = [path.name for path in sorted(directory.glob("*"))]
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        return (
            f", but weights in PyTorch's format ({printable(pickles[0])}), which can run code when they are read; "
            "convert them to safetensors: load the folder with transformers' AutoModelForCausalLM.from_pretrained and "
            "write it with save_pretrained"
        )
    if ggufs := [name for name in names if name.lower().endswith(".gguf")]:
        return f", but weights in the GGUF format ({printable(ggufs[0])}); download the model's safetensors instead"
    return "; download the model's safetensors, or convert it to them"


def _shards(directory: Path) -> Files:
    path = directory / INDEX
    weight_map = _read_index(path)
    names = sorted(set(weight_map.values()))
    if not names:
        raise ConfigError(f"{path} names no files; download it again")
    if bad := [name for name in names if Path(name).name != name]:
        raise ConfigError(f"{path} names files outside its directory: {_names(bad)}")
    if absent := [name for name in names if not _is_file(directory / name)]:
        raise ConfigError(f"{path} names files that are missing: {_names(absent)}; download them")
    files = {directory / name: read_header(directory / name) for name in names}
    problems = []
    holders: dict[str, list[str]] = {}
    for file, found in files.items():
        for name in found:
            holders.setdefault(name, []).append(file.name)
    for name, held in holders.items():
        if len(held) > 1:
            problems.append(f"{printable(name)} is in {_names(held, ' and ')}")
    for name, shard in weight_map.items():
        if shard not in holders.get(name, []):
            problems.append(f"{printable(name)} is not in {printable(shard)}")
    if problems:
        raise ConfigError(f"{path} does not match its files:\n  {list_faults(problems)}")
    return files


def _read_index(path: Path) -> dict[str, str]:
    """Return the name of the file of each tensor."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_INDEX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(text) > MAX_INDEX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_INDEX_BYTES} bytes, the most that an index may have")
    if text.startswith(LFS_MARK):
        raise ConfigError(f"{path} is a Git LFS pointer and not the file itself; run `git lfs pull` in its folder")
    try:
        return msgspec.json.decode(text, type=_Index).weight_map
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is malformed: {printable(str(error))}") from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is longer than the file system allows
        return False


def _names(names: list[str], separator: str = ", ") -> str:
    """Join names, of many only the first five."""
    kept = [printable(name) for name in names[:5]]
    text = separator.join(kept)
    return text if len(names) <= len(kept) else f"{text} and {len(names) - len(kept)} more"
