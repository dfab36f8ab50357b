"""A linear map, and the hook that decides how its weight is kept and multiplied."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine_core.loader.slots import WeightSlot

MIN_ROWS_ON_CPU = 4


class LinearMethod(Protocol):
    """Chosen when a model is built; models know shapes only."""

    def allocate(self, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """An unfilled weight of shape [outputs, inputs], in any memory layout."""

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x: [T, inputs]; weight: what `allocate` returned, filled; bias: [outputs]. Returns [T, outputs]."""


class PlainMethod:
    """Weights in their own dtype, row after row."""

    def allocate(self, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.empty(outputs, inputs, device=device, dtype=dtype)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)


class CpuMethod:
    """Weights in their own dtype, column after column, and never fewer than 4 rows of input.

    Over this layout a small float32 product rounds each row alike whatever the number of rows, but for a single one,
    which takes a path of its own. So a token's result does not depend on how many others are in its batch. Large
    products are split by their number of rows, and equal up to rounding only.
    """

    def allocate(self, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.empty(inputs, outputs, device=device, dtype=dtype).t()

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        if rows >= MIN_ROWS_ON_CPU:
            return functional.linear(x, weight, bias)
        padded = x.expand(MIN_ROWS_ON_CPU, -1) if rows == 1 else functional.pad(x, (0, 0, 0, MIN_ROWS_ON_CPU - rows))
        return functional.linear(padded, weight, bias)[:rows]


def default_method(device: torch.device) -> LinearMethod:
    """The unquantized method of a device."""
    return CpuMethod() if device.type == "cpu" else PlainMethod()


class Linear:
    """y = x W^T + b."""

    def __init__(self, weight: Tensor, bias: Tensor | None, method: LinearMethod) -> None:
        """weight: [outputs, inputs] as the method keeps it; bias: [outputs]."""
        self.weight = weight
        self.bias = bias
        self.method = method

    @classmethod
    def build(
        cls, outputs: int, inputs: int, bias: bool, device: torch.device, dtype: torch.dtype, method: LinearMethod
    ) -> "Linear":
        """Unfilled."""
        vector = torch.empty(outputs, device=device, dtype=dtype) if bias else None
        return cls(method.allocate(outputs, inputs, device, dtype), vector, method)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, inputs]. Returns [T, outputs]."""
        return self.method.apply(x, self.weight, self.bias)

    def slots(self, prefix: str, name: str, parts: dict[str, int] | None = None) -> dict[str, WeightSlot]:
        """Where checkpoint tensors go: `prefix + part` for each part (a name and its outputs, in order) of a fused
        projection, and `prefix + name` for the whole."""
        slots = {}
        for kind, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is None:
                continue
            start = 0
            for part, length in (parts or {}).items():
                slots[f"{prefix}{part}.{kind}"] = WeightSlot(parameter, start, length)
                start += length
            slots[f"{prefix}{name}.{kind}"] = WeightSlot(parameter, 0, parameter.shape[0])
        return slots
