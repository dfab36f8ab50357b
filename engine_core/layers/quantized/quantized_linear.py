"""Base of quantized linear weights."""

from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.layers.torch_linear import CpuLinear, TorchLinear
from tandem.engine_core.layers.unfused_linear import UnfusedLinear


class QuantizedLinear(UnfusedLinear):
    """Weights that are dequantized to the dtype of their inputs.

    This implementation works on any device and for any number of rows: it dequantizes the weights in each call.
    Activations are not quantized, whatever the checkpoint's scheme.
    """

    @abstractmethod
    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weights, [outputs, inputs]."""

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Implement `LinearWeights.apply`."""
        weight = self.dequantized(x.dtype)
        if x.device.type != "cpu":
            return TorchLinear(weight, self.bias, self.kernels).apply(x, out)
        return CpuLinear(weight.t().contiguous().t(), self.bias, self.kernels).apply(x, out)

    def embedding_table(self) -> Tensor:
        """Implement `LinearWeights.embedding_table`: quantized weights have none."""
        raise ConfigError("the output head is quantized, but shares its weights with the embedding")


PartSlice = tuple[str, int, int]
"""Tensor name prefix of a projection, its first output and its number of outputs."""


def part_slices(prefix: str, name: str, parts: Mapping[str, int] | None, outputs: int) -> list[PartSlice]:
    """List the parts of a fused projection, followed by the whole.

    prefix, name, parts: as in `LinearWeights.slots`; outputs: of the whole.
    """
    found, start = [], 0
    for part, length in (parts or {}).items():
        found.append((f"{prefix}{part}", start, length))
        start += length
    return [*found, (f"{prefix}{name}", 0, outputs)]


def reject_nonfinite(
    name: str, transform: Callable[[Tensor], Tensor], what: str = "scales"
) -> Callable[[Tensor], Tensor]:
    """Return a transform that also raises ConfigError for NaN or infinite values.

    name: of the tensor; transform: from the stored tensor to the slot's; what: the values' name in the error.
    """

    def check(stored: Tensor) -> Tensor:
        if not bool(stored.float().isfinite().all()):
            raise ConfigError(
                f"{name}: it has {what} that are NaN or infinite; the checkpoint is damaged, download it again"
            )
        return transform(stored)

    return check
