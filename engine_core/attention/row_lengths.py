"""Row lengths whose maximum FlashInfer can compute fast."""

from collections.abc import Iterator

import torch
from torch import Tensor


class RowLengths(Tensor):
    """Host tensor [B] that iterates over its largest element only.

    FlashInfer's `plan` calls Python's `max` on the lengths, which compares elements one by one as tensors: 0.3 ms for
    the 64 rows of a graph, longer than the rest of planning. With torch functions disabled for this class, anything
    computed from it is an ordinary tensor; `cpu` and `flatten`, which are no-ops, return it unchanged.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.amax(),))
