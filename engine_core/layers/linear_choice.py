"""Choice of the storage format of a model's linear weights.

It depends on the device and on the format of the checkpoint.
A quantized format needs a `LinearMethod` in a module of its own, its kernel, and a line in `_choose_method`.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.kernel_set import torch_kernels, triton_kernels
from tandem.engine_core.layers.build_context import BuildContext, LinearMethod
from tandem.engine_core.layers.torch_linear import CpuMethod, TorchMethod

Quantization = Mapping[str, Any]
"""The `quantization_config` of a config.json."""


def torch_build_context(
    device: torch.device, dtype: torch.dtype, quantization: Quantization | None = None
) -> BuildContext:
    """Return a context of plain torch, for any device.

    Raises ConfigError for a quantization that is not supported.
    """
    plain: LinearMethod = CpuMethod() if device.type == "cpu" else TorchMethod()
    return BuildContext(device, dtype, _choose_method(quantization, plain), plain, torch_kernels())


def triton_build_context(
    device: torch.device, dtype: torch.dtype, gpu: GpuTraits, quantization: Quantization | None = None
) -> BuildContext:
    """Return a context of Triton kernels for a GPU.

    Raises ConfigError for a quantization that is not supported.
    """
    from tandem.engine_core.layers.triton_linear import TritonMethod

    plain = TritonMethod(gpu)
    return BuildContext(device, dtype, _choose_method(quantization, plain), plain, triton_kernels(gpu.pdl))


def check_quantization(quantization: Quantization | None) -> None:
    """Raise ConfigError for a quantization that no linear method implements."""
    if quantization is not None:
        method = quantization.get("quant_method", "unknown")
        raise ConfigError(
            f'config.json: quantization_config with quant_method "{method}" is not supported: serve the unquantized '
            "checkpoint"
        )


def _choose_method(quantization: Quantization | None, plain: LinearMethod) -> LinearMethod:
    """Return the method of a quantization, `plain` without one."""
    check_quantization(quantization)
    return plain
