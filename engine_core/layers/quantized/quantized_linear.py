"""Base of quantized linear weights."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.layers.torch_linear import CpuLinear, TorchLinear
from tandem.engine_core.layers.unfused_linear import UnfusedLinear

MAX_WEIGHT = torch.finfo(torch.float16).max
"""Maximum absolute weight: those of models are far smaller, and larger ones overflow in a step."""


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


def reject_overflow(
    name: str, transform: Callable[[Tensor], Tensor], what: str = "scales", multiplied_by: float = 1.0
) -> Callable[[Tensor], Tensor]:
    """Return a transform that also raises ConfigError for values that make weights infinite, NaN included.

    name: of the tensor; transform: from the stored tensor to the slot's; what: the values' name in the error;
    multiplied_by: maximum absolute number that a value is multiplied by.
    """

    def check(stored: Tensor) -> Tensor:
        # Of either sign: some tools write negative scales.
        largest = stored.float().abs().amax().item() if stored.numel() else 0.0
        if not math.isfinite(largest):
            raise ConfigError(
                f"{name}: it has {what} that are NaN or infinite; the checkpoint is damaged, download it again"
            )
        if largest * multiplied_by > MAX_WEIGHT:
            raise ConfigError(
                f"{name}: it has {what} up to {largest:g}, so weights up to {largest * multiplied_by:g}, maximum "
                f"{MAX_WEIGHT:g}; the checkpoint is damaged, download it again"
            )
        return transform(stored)

    return check
