"""Context in which a model's layers are built."""

from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.layers.linear import LinearWeights


class LinearMethod(Protocol):
    """Storage format of linear weights.

    It is chosen when a model is built; models only define shapes.
    """

    def build(self, outputs: int, inputs: int, bias: bool, context: "BuildContext") -> LinearWeights:
        """Allocate the uninitialized weights of a linear layer with `inputs` inputs and `outputs` outputs."""


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Device, dtype and implementations of a model's layers."""

    device: torch.device
    dtype: torch.dtype
    linear_method: LinearMethod
    """Linear method of the projections inside the layers."""
    head_method: LinearMethod
    """Linear method of the output head, which quantized checkpoints leave unquantized."""
    kernels: KernelSet
