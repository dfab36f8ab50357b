"""Program that checks a checkpoint before a swap, and reads it into the page cache.

Usage: `python -m tandem.engine_core.startup.stage_checkpoint FOLDER ROOT LINKS [COPY]`, with a pickled `ServedModel` of
the engine on stdin. It writes `percent N` lines to stdout, and exits with 0, or with 1 after a line with the reason why
the weights of FOLDER cannot take the place of the engine's. ROOT: folder below which its files must lie, "" for any;
LINKS: empty folder for links to them (`link_files`); COPY: folder of a `CheckpointCopy`, which is filled, and checked
in place of FOLDER.
"""

import logging
import os
import pickle
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import structs

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.checkpoint import Checkpoint, read_stored
from tandem.engine_core.loader.error_text import printable
from tandem.engine_core.loader.fit import IGNORED_SUFFIXES
from tandem.engine_core.loader.header import StoredTensor
from tandem.engine_core.loader.regular_file import open_regular
from tandem.engine_core.loader.slots import FLOAT_DTYPES
from tandem.engine_core.models.registry import open_checkpoint
from tandem.engine_core.runtime.device import CpuDevice
from tandem.engine_core.startup.checkpoint_copy import CHUNK_BYTES, fill_copy
from tandem.engine_core.startup.opened_files import check_files, link_files
from tandem.engine_core.startup.served_model import ServedModel
from tandem.engine_core.startup.staged_values import KV_SCALES, check_values

_FREE = (*IGNORED_SUFFIXES, *KV_SCALES)
"""Suffixes of tensors that a checkpoint may have or lack: KV scales are calibrated then."""
_MAX_NAMED = 3
_CONTEXT = 60
"""Characters that an error shows before the first difference of two long values."""


def check_swap(served: ServedModel, folder: Path) -> None:
    """Check that the weights of a folder can take the place of those of a model without anything else changing.

    Raises ConfigError with the first difference and both of its values.
    """
    check_files(folder)
    base, found = served.folder, ServedModel.read(folder)
    if served.config.architecture != found.config.architecture:
        raise ConfigError(
            f"the architecture is {found.config.architecture}, that of {base} is {served.config.architecture}"
        )
    fields = structs.asdict(found.config)
    for name, value in structs.asdict(served.config).items():
        if name == "dtype":
            continue  # Weights are cast to the engine's.
        if value != fields[name]:
            raise _difference(name, fields[name], value, base)
    for what, held in served.files.items():
        if found.files[what] != held:
            if what == "generation_config.json":
                raise _difference(what, *_differing(found.files[what], held), base)
            raise _difference(what, found.files[what], held, base)
    ours, theirs = open_checkpoint(base, served.config), open_checkpoint(folder, found.config)
    _check_tensors(ours, theirs)
    check_values(ours, theirs, found.config)


def _check_tensors(base: Checkpoint, found: Checkpoint) -> None:
    """Check names, shapes and dtypes of tensors, and whether their inputs have an order."""
    held, given = _compared(base), _compared(found)
    for words, names in (("lacks", held.keys() - given.keys()), ("has", given.keys() - held.keys())):
        if names:
            named = ", ".join(printable(name) for name in sorted(names)[:_MAX_NAMED])
            raise ConfigError(f"{found.directory} {words} {len(names)} tensors unlike {base.directory}: {named}")
    for name, tensor in given.items():
        other = held[name]
        if tensor.shape != other.shape:
            raise ConfigError(f"{name} has shape {list(tensor.shape)}, in {base.directory} {list(other.shape)}")
        if tensor.dtype != other.dtype and not {tensor.dtype, other.dtype} <= set(FLOAT_DTYPES):
            raise ConfigError(f"{name} is {tensor.dtype}, in {base.directory} {other.dtype}")
        if name.endswith("g_idx") and _is_sorted(tensor) != _is_sorted(other):
            given_word, held_word = ("an order", "none") if _is_sorted(other) else ("no order", "one")
            raise ConfigError(f"{name} has {given_word} of its inputs (act-order), in {base.directory} {held_word}")
    head = ("model.embed_tokens.weight", "lm_head.weight")
    if found.tensors_differ(*head) != base.tensors_differ(*head):
        raise ConfigError(f"{' and '.join(head)} are equal in one of {found.directory} and {base.directory} only")


def _compared(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Return the tensors that two checkpoints must both have, by name.

    Biases of quantized layers are left out: `check_fit` refuses those that are missing, or not 0 and not in the model.
    """
    biases = {f"{name.removesuffix('qweight')}bias" for name in checkpoint.tensors if name.endswith(".qweight")}
    tensors = checkpoint.tensors.items()
    return {name: tensor for name, tensor in tensors if name not in biases and not name.endswith(_FREE)}


def _is_sorted(tensor: StoredTensor) -> bool:
    groups = read_stored(tensor).flatten()
    return bool((groups[1:] >= groups[:-1]).all())


def _difference(what: str, found: object, held: object, base: Path) -> ConfigError:
    """Return the error that names both values; of ones that read the same, the details from the first difference on."""
    texts = str(found), str(held)
    if texts[0] == texts[1]:
        texts = repr(found), repr(held)
        same = next((at for at, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), 0)
        texts = texts[0][max(0, same - _CONTEXT) :], texts[1][max(0, same - _CONTEXT) :]
    return ConfigError(f"{what} is {_short(texts[0])}, that of {base} is {_short(texts[1])}")


def _differing(found: Any, held: Any) -> tuple[Any, Any]:
    """Return two JSON values; of objects, only the fields in which they differ."""
    if not isinstance(found, dict) or not isinstance(held, dict):
        return found, held
    same = {name for name in found.keys() & held.keys() if found[name] == held[name]}
    return {k: v for k, v in found.items() if k not in same}, {k: v for k, v in held.items() if k not in same}


def _short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= 300 else f"{text[:300]}..."


def read_through(folder: Path) -> Iterator[int]:
    """Read all files of a checkpoint once; yield the percentage after each chunk."""
    paths = {tensor.path for tensor in Checkpoint.open(folder).tensors.values()}
    total, done, buffer = sum(path.stat().st_size for path in paths), 0, bytearray(CHUNK_BYTES)
    for path in sorted(paths):
        with open(path, "rb", buffering=0, opener=open_regular) as file:
            while count := file.readinto(buffer):
                done += count
                yield done * 100 // max(1, total)


def main() -> int:
    parent = os.getppid()
    os.nice(10)
    logging.disable(logging.WARNING)
    folder, root, links, *copies = map(Path, sys.argv[1:])
    try:
        served, shown = pickle.load(sys.stdin.buffer), -1
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        link_files(folder, root if sys.argv[2] else None, links)
        for percent in _stage(served, links, copies[0] if copies else None):
            if os.getppid() != parent:
                return 1  # The engine is gone.
            if percent != shown:
                print(f"percent {percent}", flush=True)
                shown = percent
    except BrokenPipeError:
        return _give_up()
    except Exception as error:  # Whatever a file makes a parser raise is a reason.
        text = str(error) if isinstance(error, ConfigError | OSError) else f"{type(error).__name__}: {error}"
        for made in (links, *copies):
            text = text.replace(str(made), str(folder))
        try:
            print(" ".join(text.split()), flush=True)
        except BrokenPipeError:
            return _give_up()
        return 1
    return 0


def _stage(served: ServedModel, folder: Path, copy: Path | None) -> Iterator[int]:
    """Check a checkpoint and read it, or make its copy and check that; yield the percentage that was read."""
    if copy is None:
        check_swap(served, folder)
        yield from read_through(folder)
    else:
        yield from fill_copy(folder, copy, CpuDevice().free_bytes())
        check_swap(served, copy)


def _give_up() -> int:
    """Return the exit code of a process without an engine; without this, Python would flush stdout and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


if __name__ == "__main__":
    sys.exit(main())
