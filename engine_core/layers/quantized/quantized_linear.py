"""Quantized linear weights, of any format."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.layers.linear import Norm, projection_slots
from tandem.engine_core.layers.torch_linear import CpuLinear, TorchLinear
from tandem.engine_core.loader.slots import WeightSlot


class QuantizedLinear(ABC):
    """Weights that are multiplied as if they were in the dtype of their inputs.

    This is the product for any device and any number of rows: it makes the weights anew for each call. Norm and
    activation are separate launches. Inputs keep their precision, whatever the checkpoint's scheme of activations.
    """

    def __init__(self, bias: Tensor | None, kernels: KernelSet) -> None:
        """Keep the bias, [outputs], and the operations of the device."""
        self.bias = bias
        self.kernels = kernels

    @abstractmethod
    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weights as numbers, [outputs, inputs]."""

    @abstractmethod
    def weight_slots(self, prefix: str, name: str, parts: Mapping[str, int] | None) -> list[WeightSlot]:
        """List the slots of everything but the bias; see `LinearWeights.slots`."""

    def apply(self, x: Tensor) -> Tensor:
        """Implement `LinearWeights.apply`."""
        weight = self.dequantized(x.dtype)
        if x.device.type != "cpu":
            return TorchLinear(weight, self.bias, self.kernels).apply(x)
        return CpuLinear(weight.t().contiguous().t(), self.bias, self.kernels).apply(x)

    def apply_normed(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Implement `LinearWeights.apply_normed` with `self.apply`."""
        normed, stream = norm(x, residual)
        product = self.apply(normed)
        return (product if activation is None else self.kernels.gated_activation(product, activation)), stream

    def slots(self, prefix: str, name: str, parts: Mapping[str, int] | None = None) -> list[WeightSlot]:
        """Implement `LinearWeights.slots`."""
        slots = self.weight_slots(prefix, name, parts)
        return slots if self.bias is None else slots + projection_slots(self.bias, prefix, name, parts, "bias")

    def embedding_table(self) -> Tensor:
        """Implement `LinearWeights.embedding_table`: quantized weights have none."""
        raise ConfigError("the output head is quantized, but shares its weights with the embedding")


Place = tuple[str, int, int]
"""Name of a tensor's projection, first output and number of outputs."""


def places(prefix: str, name: str, parts: Mapping[str, int] | None, outputs: int) -> list[Place]:
    """List the parts of a projection, and the whole last.

    prefix, name, parts: as in `LinearWeights.slots`; outputs: of the whole.
    """
    found, start = [], 0
    for part, length in (parts or {}).items():
        found.append((f"{prefix}{part}", start, length))
        start += length
    return [*found, (f"{prefix}{name}", 0, outputs)]
