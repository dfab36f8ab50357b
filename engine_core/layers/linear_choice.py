"""Choice of the linear methods of a model's weights.

They depend on the device and on the quantization of the checkpoint. A new format needs a scheme in `quantization`, a
`LinearMethod` in `layers.quantized`, and a line here.
"""

from functools import cache

import torch

from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.kernel_set import torch_kernels, triton_kernels
from tandem.engine_core.layers.build_context import BuildContext, LinearMethod
from tandem.engine_core.layers.experts import TorchExpertMethod
from tandem.engine_core.layers.quantized.eight_bit_linear import EightBitMethod
from tandem.engine_core.layers.quantized.int4_linear import Int4Method
from tandem.engine_core.layers.quantized.w8a16_linear import W8A16Method
from tandem.engine_core.layers.torch_linear import CpuMethod, TorchMethod
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import EightBitScheme, Scheme, W8A16Scheme


def torch_build_context(
    device: torch.device, dtype: torch.dtype, quantization: Quantization | None = None
) -> BuildContext:
    """Return a context of plain torch, for any device."""

    @cache
    def method_for(scheme: Scheme | None) -> LinearMethod:
        if scheme is None:
            return CpuMethod() if device.type == "cpu" else TorchMethod()
        if isinstance(scheme, EightBitScheme):
            return EightBitMethod(scheme)
        return W8A16Method(scheme) if isinstance(scheme, W8A16Scheme) else Int4Method(scheme)

    return BuildContext(device, dtype, quantization, method_for, torch_kernels(), TorchExpertMethod())


def triton_build_context(
    device: torch.device, dtype: torch.dtype, gpu: GpuTraits, quantization: Quantization | None = None
) -> BuildContext:
    """Return a context of Triton kernels for a GPU. All weights share a workspace."""
    from tandem.engine_core.layers.quantized.triton_eight_bit_linear import TritonEightBitMethod
    from tandem.engine_core.layers.quantized.triton_int4_linear import TritonInt4Method
    from tandem.engine_core.layers.quantized.triton_w8a16_linear import TritonW8A16Method
    from tandem.engine_core.layers.triton_experts import TritonExpertMethod
    from tandem.engine_core.layers.triton_linear import TritonMethod

    plain = TritonMethod(gpu)

    @cache
    def method_for(scheme: Scheme | None) -> LinearMethod:
        if scheme is None:
            return plain
        if isinstance(scheme, EightBitScheme):
            return TritonEightBitMethod(scheme, gpu, plain.workspace)
        if isinstance(scheme, W8A16Scheme):
            return TritonW8A16Method(scheme, gpu, plain.workspace)
        return TritonInt4Method(scheme, gpu, plain.workspace)

    return BuildContext(device, dtype, quantization, method_for, triton_kernels(gpu.pdl), TritonExpertMethod(gpu))
