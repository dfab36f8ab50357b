"""Lengths of a step's rows, of which FlashInfer takes the longest quickly."""

from collections.abc import Iterator

import torch
from torch import Tensor


class RowLengths(Tensor):
    """Host tensor [B] that iterates over nothing but its largest element.

    FlashInfer's `plan` applies Python's `max` to the lengths, which compares them one by one as tensors: for the 64
    rows of a graph 0.3 ms, longer than all else that it does. With torch functions disabled for this class, what is
    computed from it is an ordinary tensor; `cpu` and `flatten`, which have nothing to do, return it as it is.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.amax(),))
