"""The header of a safetensors file, checked whole before any tensor is read.

A file is the header's length in 8 bytes, little-endian; the header, a JSON object; and the tensors' bytes; each byte
belongs to exactly one tensor (https://github.com/huggingface/safetensors). Headers may come from anyone, so nothing in
one is believed: it is parsed entry by entry, and its tensors have to lie within the file.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta, Struct

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.error_text import printable
from tandem.engine_core.loader.regular_file import open_regular

MAX_HEADER_BYTES = 100_000_000
"""Longest header that the format allows."""
MAX_ENTRY_BYTES = 4096
"""Longest description of one tensor, without its name."""
MAX_TENSORS = 100_000
"""Largest number of tensors in one file; the largest models have that many in all their files together."""
LENGTH_BYTES = 8
LFS_MARK = b"version https://git-lfs"

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of an element of each dtype, in the words of safetensors."""
TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "U16": torch.uint16, "I16": torch.int16,
    "F16": torch.float16, "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
"""Torch's dtypes of those that a slot may read."""

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_SPACE = rb"[ \t\r\n]*+"
_MEMBER = re.compile(
    _SPACE + rb"(" + _STRING + rb")" + _SPACE + rb":" + _SPACE
    + rb'(\{(?:[^"{}]++|' + _STRING + rb")*+\})" + _SPACE + rb"([,}])", re.DOTALL
)  # fmt: skip
"""A name, an object without nested objects, and the text after them."""
_END = re.compile(_SPACE + rb"\Z")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, and where it lies."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Dtype in the words of safetensors, such as "BF16"."""
    path: Path
    start: int
    """First byte in the file."""
    nbytes: int


class _Entry(Struct):
    dtype: str
    shape: list[Annotated[int, Meta(ge=0)]]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


def read_header(
    path: Path, max_bytes: int = MAX_HEADER_BYTES, opener: Callable[[str, int], int] = open_regular
) -> dict[str, StoredTensor]:
    """Return the tensors of a file, by name.

    max_bytes: of the header; opener: as of `open`. Raises ConfigError if the file is not whole and well-formed.
    """
    try:
        with open(path, "rb", opener=opener) as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_length(file.read(max(LENGTH_BYTES, len(LFS_MARK))), size, max_bytes)
            file.seek(LENGTH_BYTES)
            header = file.read(length)
        if len(header) < length:
            raise _FormatError(f"it ended within its header of {length} bytes while it was read")
        found = _tensors(header, path)
        _check_layout(list(found.values()), LENGTH_BYTES + length, size)
    except _FormatError as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    return found


class _FormatError(Exception):
    """A file violates the format; the text describes how."""


def _header_length(start: bytes, size: int, max_bytes: int) -> int:
    """Return the length of the header in bytes.

    start: first bytes of the file; size: bytes of the file; max_bytes: most bytes of the header.
    """
    if not size:
        raise _FormatError("it is empty; download it again")
    if start.startswith(LFS_MARK):
        raise _FormatError("it is a Git LFS pointer and not the file itself; run `git lfs pull` in its folder")
    if size < LENGTH_BYTES:
        raise _FormatError(f"it has only {size} bytes; download it again")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if length > max_bytes:
        raise _FormatError(f"its header would have {length} bytes, at most {max_bytes}; it is another format")
    if length > size - LENGTH_BYTES:
        raise _FormatError(f"its header has {length} bytes, but the file only {size}; download it again")
    return length


def _tensors(header: bytes, path: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    metadata = False
    for raw_name, raw_entry in _members(header):
        try:
            name = msgspec.json.decode(raw_name, type=str)
            name.encode()
        except (msgspec.MsgspecError, ValueError):
            raise _FormatError(f"the name {printable(repr(raw_name))} is not UTF-8 text") from None
        if name in found or (name == "__metadata__" and metadata):
            raise _FormatError(f"its header names {printable(name)} twice")
        if name == "__metadata__":
            metadata = True
        else:
            found[name] = _tensor(name, raw_entry, LENGTH_BYTES + len(header), path)
            if len(found) > MAX_TENSORS:
                raise _FormatError(f"it has more than {MAX_TENSORS} tensors")
    return found


def _members(header: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield names and values of the header's object, both still in JSON.

    The values are objects without objects in them, and need not be well-formed.
    """
    if not header.startswith(b"{"):
        raise _FormatError("its header is not a JSON object")
    position = 1
    if empty := re.compile(_SPACE + rb"\}").match(header, position):
        position = empty.end()
    else:
        separator = b","
        while separator == b",":
            member = _MEMBER.match(header, position)
            if member is None:
                raise _FormatError(f"its header is malformed from byte {LENGTH_BYTES + position} of the file on")
            yield member[1], member[2]
            separator, position = member[3], member.end()
    if _END.match(header, position) is None:
        raise _FormatError(f"its header goes on after its end, from byte {LENGTH_BYTES + position} of the file on")


def _tensor(name: str, raw: bytes, data: int, path: Path) -> StoredTensor:
    """Return the tensor that an entry describes.

    data: first byte of the tensors' bytes in the file.
    """
    if len(raw) > MAX_ENTRY_BYTES:
        raise _FormatError(f"the entry of {printable(name)} has {len(raw)} bytes, at most {MAX_ENTRY_BYTES}")
    try:
        fields = json.loads(raw.decode(), object_pairs_hook=list)
        entry = msgspec.convert(dict(fields), _Entry)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _FormatError(f"the entry of {printable(name)} is malformed: {printable(str(error))}") from None
    if len({field for field, _ in fields}) < len(fields):
        raise _FormatError(f"the entry of {printable(name)} names a field twice")
    if entry.dtype not in BITS:
        raise _FormatError(
            f"{printable(name)} has the unknown dtype {printable(entry.dtype)}; known: {', '.join(BITS)}"
        )
    start, end = entry.data_offsets
    if math.prod(entry.shape) * BITS[entry.dtype] != 8 * (end - start):
        raise _FormatError(
            f"{printable(name)} has the shape {printable(str(entry.shape))} in {entry.dtype}, which does not take the "
            f"{printable(str(end - start))} bytes of its data_offsets"
        )
    return StoredTensor(name, tuple(entry.shape), entry.dtype, path, data + start, end - start)


def _check_layout(tensors: list[StoredTensor], data: int, size: int) -> None:
    """Check that each byte from `data` to the file's end belongs to one tensor.

    size: bytes of the file.
    """
    reached, before = data, "the header"
    for tensor in sorted(tensors, key=lambda item: (item.start, item.nbytes)):
        if tensor.start < reached:
            raise _FormatError(f"{printable(before)} and {printable(tensor.name)} overlap at byte {tensor.start}")
        if tensor.start > reached:
            raise _FormatError(f"bytes {reached} to {tensor.start - 1} belong to no tensor")
        reached, before = tensor.start + tensor.nbytes, tensor.name
        if reached > size:
            raise _FormatError(f"{printable(before)} ends at byte {reached}, but the file at {size}; download it again")
    if reached < size:
        raise _FormatError(f"bytes {reached} to {size - 1}, at its end, belong to no tensor; download it again")
