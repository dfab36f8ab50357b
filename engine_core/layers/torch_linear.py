"""Unquantized linear weights in torch, on any device."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights, projection_slots
from tandem.engine_core.layers.unfused_linear import UnfusedLinear
from tandem.engine_core.loader.slots import WeightSlot

MIN_ROWS_ON_CPU = 4


class TorchLinear(UnfusedLinear):
    """Weights in the model's dtype, using torch's matmul."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: KernelSet) -> None:
        """Store the weights.

        weight: [outputs, inputs], in any memory layout; bias: [outputs].
        """
        super().__init__(bias, kernels)
        self.weight = weight

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Implement `LinearWeights.apply`."""
        if out is None:
            return functional.linear(x, self.weight, self.bias)
        torch.mm(x, self.weight.t(), out=out)
        return out if self.bias is None else out.add_(self.bias)

    def weight_slots(self, prefix: str, name: str, parts: Mapping[str, int] | None) -> list[WeightSlot]:
        """Implement `UnfusedLinear.weight_slots`: the tensor `weight`."""
        return projection_slots(self.weight, prefix, name, parts, "weight")

    def embedding_table(self) -> Tensor:
        """Implement `LinearWeights.embedding_table`."""
        return self.weight


class CpuLinear(TorchLinear):
    """Column-major weights, multiplied with at least 4 rows of input.

    In this layout the rounding of a row of a small float32 matmul does not depend on the number of rows, except for a
    single row, which uses another code path. So a token's result does not depend on its batch size. Large matmuls are
    split by their number of rows, and are equal up to rounding only.
    """

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Implement `LinearWeights.apply`, padding to 4 rows."""
        rows = x.shape[0]
        if rows < MIN_ROWS_ON_CPU:
            x = x.expand(MIN_ROWS_ON_CPU, -1) if rows == 1 else functional.pad(x, (0, 0, 0, MIN_ROWS_ON_CPU - rows))
        y = functional.linear(x, self.weight, self.bias)[:rows]
        return y if out is None else out.copy_(y)


class TorchMethod:
    """Linear method for any device: row-major weights in the model's dtype."""

    def build(self, outputs: int, inputs: int, bias: bool, context: BuildContext) -> LinearWeights:
        """Implement `LinearMethod.build`."""
        weight = torch.empty(outputs, inputs, device=context.device, dtype=context.dtype)
        return TorchLinear(weight, empty_bias(outputs, bias, context), context.kernels)


class CpuMethod:
    """Linear method for a CPU: column-major weights in the model's dtype (see `CpuLinear`)."""

    def build(self, outputs: int, inputs: int, bias: bool, context: BuildContext) -> LinearWeights:
        """Implement `LinearMethod.build`."""
        weight = torch.empty(inputs, outputs, device=context.device, dtype=context.dtype).t()
        return CpuLinear(weight, empty_bias(outputs, bias, context), context.kernels)


def empty_bias(outputs: int, bias: bool, context: BuildContext) -> Tensor | None:
    """Allocate a bias, [outputs], or return None if the layer has none."""
    return torch.empty(outputs, device=context.device, dtype=context.dtype) if bias else None
