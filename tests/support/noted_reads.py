"""Places of memory that kernels read under Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

Places = NDArray[np.uint64]


@contextmanager
def noted_reads() -> Iterator[list[Places]]:
    """Note the addresses of all elements that loads do not mask."""
    found: list[Places] = []
    load = InterpreterBuilder.create_masked_load

    def note(builder: Any, places: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        found.append(places.data[np.broadcast_to(mask.data, places.data.shape).astype(bool)].reshape(-1))
        return load(builder, places, mask, *rest, **options)

    with patch.object(InterpreterBuilder, "create_masked_load", note):
        yield found


def sample_buffers(tensor: Tensor) -> Places:
    """Return the addresses of a tensor's elements."""
    offsets = torch.zeros(tensor.shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        along = torch.arange(size) * stride
        offsets += along.view([-1 if other == dim else 1 for other in range(tensor.ndim)])
    return (tensor.data_ptr() + offsets.flatten() * tensor.element_size()).numpy().astype(np.uint64)


def count_strays(reads: list[Places], *tensors: Tensor) -> int:
    """Return the number of reads of anything but elements of tensors. Raises ValueError if nothing was read."""
    return int((~np.isin(np.concatenate(reads), np.concatenate([sample_buffers(tensor) for tensor in tensors]))).sum())


def with_room(tensor: Tensor, room: int) -> Tensor:
    """Return a copy of a dense tensor that is followed by memory of as many elements, which must not be read."""
    memory = torch.zeros(tensor.numel() + room, dtype=tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
