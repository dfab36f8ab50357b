"""A linear map."""

import torch
from torch import Tensor

from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear_method import LinearMethod
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.loader.slots import WeightSlot


class Linear:
    """y = x W^T + b."""

    def __init__(self, weight: Tensor, bias: Tensor | None, method: LinearMethod) -> None:
        """weight: [outputs, inputs] as the method keeps it; bias: [outputs]."""
        self.weight = weight
        self.bias = bias
        self.method = method

    @classmethod
    def build(cls, outputs: int, inputs: int, bias: bool, context: BuildContext) -> "Linear":
        """Unfilled."""
        vector = torch.empty(outputs, device=context.device, dtype=context.dtype) if bias else None
        return cls(context.method.allocate(outputs, inputs, context.device, context.dtype), vector, context.method)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, inputs]. Returns [T, outputs]."""
        return self.method.apply(x, self.weight, self.bias)

    def normed(self, x: Tensor, residual: Tensor | None, norm: RMSNorm, gated: bool = False) -> tuple[Tensor, Tensor]:
        """The map of a norm of the residual stream, x added to it first; see `LinearMethod.apply_normed`."""
        return self.method.apply_normed(x, residual, norm.weight, norm.eps, self.weight, self.bias, gated)

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
