"""Base of linear weights whose matmul is a separate launch from norm and activation."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.kernels.lora.adapter_tokens import AdapterTokens
from tandem.engine_core.kernels.lora.lora_updates import LoraUpdates
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.layers.linear import LinearWeights, Norm, projection_slots
from tandem.engine_core.loader.slots import WeightSlot


class UnfusedLinear(ABC):
    """Base class of linear weights that only define the matmul of their storage format."""

    def __init__(self, bias: Tensor | None, kernels: KernelSet) -> None:
        """Store the bias, [outputs], and the device's kernels."""
        self.bias = bias
        self.kernels = kernels

    def adapted(self, adapters: AdapterTokens | None) -> Self:
        """Implement `LinearWeights.adapted`: the layer has no adapters."""
        return self

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
        """Implement `LinearWeights.apply_gated` in two launches."""
        return self.kernels.gated_activation(self.apply(x), activation)

    def apply_updated(
        self, x: Tensor, residual: Tensor | None, norm: Norm | None, activation: Activation | None, lora: LoraUpdates
    ) -> tuple[Tensor, Tensor] | None:
        """Implement `LinearWeights.apply_updated`: no matmul adds updates itself."""
        return None

    def input_format(self, rows: int) -> ActivationFormat | None:
        """Implement `LinearWeights.input_format`: the inputs are not quantized."""
        return None

    def apply_quantized(self, x: QuantizedActivation) -> Tensor:
        """Implement `LinearWeights.apply_quantized` by dequantizing the inputs."""
        return self.apply(x.dequantize().to(x.dtype))

    def reorder_producer(self, source: LinearWeights) -> None:  # noqa: B027
        """Implement `LinearWeights.reorder_producer`: inputs keep their order."""

    @property
    def gated_order(self) -> Tensor | None:
        """Implement `LinearWeights.gated_order`: outputs keep their order."""
        return None

    def slots(self, prefix: str, name: str, parts: Mapping[str, int] | None = None) -> list[WeightSlot]:
        """Implement `LinearWeights.slots`."""
        slots = self.weight_slots(prefix, name, parts)
        return slots if self.bias is None else slots + projection_slots(self.bias, prefix, name, parts, "bias")
