"""Quantized linear weights, of any format."""

from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.layers.torch_linear import CpuLinear, TorchLinear, UnfusedLinear


class QuantizedLinear(UnfusedLinear):
    """Weights that are multiplied as if they were in the dtype of their inputs.

    This is the product for any device and any number of rows: it makes the weights anew for each call. Inputs keep
    their precision, whatever the checkpoint's scheme of activations.
    """

    @abstractmethod
    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weights as numbers, [outputs, inputs]."""

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Implement `LinearWeights.apply`."""
        weight = self.dequantized(x.dtype)
        if x.device.type != "cpu":
            return TorchLinear(weight, self.bias, self.kernels).apply(x, out)
        return CpuLinear(weight.t().contiguous().t(), self.bias, self.kernels).apply(x, out)

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


def finite(name: str, transform: Callable[[Tensor], Tensor], what: str = "scales") -> Callable[[Tensor], Tensor]:
    """Return a transform that refuses numbers which are NaN or infinite.

    It raises ConfigError. name: of the tensor; transform: makes of it what a slot holds; what: what the numbers are.
    """

    def check(stored: Tensor) -> Tensor:
        if not bool(stored.float().isfinite().all()):
            raise ConfigError(
                f"{name}: it has {what} that are NaN or infinite; the checkpoint is damaged, download it again"
            )
        return transform(stored)

    return check
