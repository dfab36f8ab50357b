"""The tensors that a trainer announces, and their packing into buffers."""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from msgspec import Struct
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.error_text import printable
from tandem.engine_core.loader.header import MAX_TENSORS, TORCH_DTYPES

WORDS = {str(dtype).removeprefix("torch."): word for word, dtype in TORCH_DTYPES.items()}
"""Dtypes in the words of safetensors, by their names in torch."""
MAX_DIMENSIONS = 8
MAX_BYTES = 2**36
"""Largest tensor; those that are received and not read need memory too."""


class TensorSpec(Struct, frozen=True):
    """One tensor that a trainer sends."""

    name: str
    """Name that it has in a checkpoint."""
    dtype: str
    """Dtype in the words of safetensors, such as "BF16"."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * TORCH_DTYPES[self.dtype].itemsize


def tensor_specs(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> tuple[TensorSpec, ...]:
    """Return the tensors of three lists of equal length.

    dtypes: as torch names them, with or without "torch.". Raises ConfigError for values that no tensor can have.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise ConfigError(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes; give one of each a tensor"
        )
    if len(names) > MAX_TENSORS:
        raise ConfigError(f"{len(names)} tensors, at most {MAX_TENSORS} are taken at once")
    specs, known = [], set[str]()
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        word = WORDS.get(dtype.removeprefix("torch."))
        if word is None:
            raise ConfigError(f"{printable(name)}: the dtype {printable(dtype)} is none of {', '.join(WORDS)}")
        if len(shape) > MAX_DIMENSIONS or any(not 0 <= length < 2**31 for length in shape):
            raise ConfigError(f"{printable(name)}: {printable(str(list(shape)))} cannot be the shape of a weight")
        spec = TensorSpec(name, word, tuple(shape))
        if spec.nbytes > MAX_BYTES:
            raise ConfigError(f"{printable(name)}: {list(shape)} takes {spec.nbytes} bytes, at most {MAX_BYTES}")
        if name in known:
            raise ConfigError(f"{printable(name)} is named twice in one call")
        known.add(name)
        specs.append(spec)
    return tuple(specs)


def packed(specs: Sequence[TensorSpec], buffer_bytes: int) -> Iterator[list[TensorSpec]]:
    """Yield the tensors of each buffer, in order.

    As in vLLM's `packed_nccl_broadcast_producer`, a buffer ends with the first tensor that makes it larger than
    `buffer_bytes`. 0: each tensor has its own.
    """
    chunk: list[TensorSpec] = []
    size = 0
    for spec in specs:
        chunk.append(spec)
        size += spec.nbytes
        if size > buffer_bytes or not buffer_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def unpacked(buffer: Tensor, specs: Sequence[TensorSpec]) -> Iterator[Tensor]:
    """Yield the tensors of a buffer, as views where their offset allows it. buffer: [bytes] uint8."""
    start = 0
    for spec in specs:
        dtype = TORCH_DTYPES[spec.dtype]
        part = buffer[start : start + spec.nbytes]
        start += spec.nbytes
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        yield (part.view(dtype) if len(part) else torch.empty(0, dtype=dtype, device=buffer.device)).view(spec.shape)
