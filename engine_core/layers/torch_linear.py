"""Unquantized linear weights in torch, on any device."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights, Norm, projection_slots
from tandem.engine_core.loader.slots import WeightSlot

MIN_ROWS_ON_CPU = 4


class UnfusedLinear(ABC):
    """Base of linear weights whose matmul is a separate launch from norm and activation."""

    def __init__(self, bias: Tensor | None, kernels: KernelSet) -> None:
        """Store the bias, [outputs], and the device's kernels."""
        self.bias = bias
        self.kernels = kernels

    @abstractmethod
    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Implement `LinearWeights.apply`."""

    @abstractmethod
    def weight_slots(self, prefix: str, name: str, parts: Mapping[str, int] | None) -> list[WeightSlot]:
        """List all slots except that of the bias; see `LinearWeights.slots`."""

    def apply_normed(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Implement `LinearWeights.apply_normed` in separate launches."""
        normed, stream = norm(x, residual)
        return (self.apply(normed) if activation is None else self.apply_gated(normed, activation)), stream

    def apply_normed_quantized(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation, to: ActivationFormat
    ) -> tuple[QuantizedActivation, Tensor]:
        """Implement `LinearWeights.apply_normed_quantized` in separate launches."""
        gate_up, stream = self.apply_normed(x, residual, norm)
        return self.kernels.quantized_gate(gate_up, activation, to), stream

    def apply_gated(self, x: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up of the matmul, [T, outputs / 2].

        The weight holds the gate's rows first.
        """
        return self.kernels.gated_activation(self.apply(x), activation)

    def input_format(self, rows: int) -> ActivationFormat | None:
        """Implement `LinearWeights.input_format`: the inputs are not quantized."""
        return None

    def apply_quantized(self, x: QuantizedActivation) -> Tensor:
        """Implement `LinearWeights.apply_quantized` by dequantizing the inputs."""
        return self.apply(x.dequantize().to(x.dtype))

    def reorder_producer(self, source: LinearWeights) -> None:  # noqa: B027
        """Implement `LinearWeights.reorder_producer`: inputs keep their order."""

    def slots(self, prefix: str, name: str, parts: Mapping[str, int] | None = None) -> list[WeightSlot]:
        """Implement `LinearWeights.slots`."""
        slots = self.weight_slots(prefix, name, parts)
        return slots if self.bias is None else slots + projection_slots(self.bias, prefix, name, parts, "bias")


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
