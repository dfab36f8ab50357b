"""Where and with what a model is built: decided once, handed to every layer."""

from dataclasses import dataclass

import torch

from tandem.engine_core.kernels.kernel_set import KernelSet, torch_kernels
from tandem.engine_core.layers.linear_method import CpuMethod, LinearMethod, PlainMethod


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Device, dtype and implementations of a model's layers."""

    device: torch.device
    dtype: torch.dtype
    method: LinearMethod
    kernels: KernelSet


def torch_build_context(device: torch.device, dtype: torch.dtype) -> BuildContext:
    """Nothing but torch, on any device."""
    kernels = torch_kernels()
    method = CpuMethod(kernels) if device.type == "cpu" else PlainMethod(kernels)
    return BuildContext(device, dtype, method, kernels)
