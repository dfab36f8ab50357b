"""Choice of the linear method of a model's weights.

It depends on the device and on the quantization of the checkpoint. A new format needs a scheme in `quantization`, a
`LinearMethod` in `layers.quantized`, and a line here.
"""

import torch

from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.kernel_set import torch_kernels, triton_kernels
from tandem.engine_core.layers.build_context import BuildContext, LinearMethod
from tandem.engine_core.layers.quantized.eight_bit_linear import EightBitMethod
from tandem.engine_core.layers.quantized.int4_linear import Int4Method
from tandem.engine_core.layers.torch_linear import CpuMethod, TorchMethod
from tandem.engine_core.quantization.scheme import EightBitScheme, Scheme


def torch_build_context(device: torch.device, dtype: torch.dtype, scheme: Scheme | None = None) -> BuildContext:
    """Return a context of plain torch, for any device."""
    plain: LinearMethod = CpuMethod() if device.type == "cpu" else TorchMethod()
    return BuildContext(device, dtype, plain if scheme is None else _any_device(scheme), plain, torch_kernels())


def triton_build_context(
    device: torch.device, dtype: torch.dtype, gpu: GpuTraits, scheme: Scheme | None = None
) -> BuildContext:
    """Return a context of Triton kernels for a GPU."""
    from tandem.engine_core.layers.quantized.triton_eight_bit_linear import TritonEightBitMethod
    from tandem.engine_core.layers.quantized.triton_int4_linear import TritonInt4Method
    from tandem.engine_core.layers.triton_linear import TritonMethod

    plain = TritonMethod(gpu)
    chosen: LinearMethod = plain
    if isinstance(scheme, EightBitScheme):
        chosen = TritonEightBitMethod(scheme, gpu, plain.workspace)
    elif scheme is not None:
        chosen = TritonInt4Method(scheme, gpu, plain.workspace)
    return BuildContext(device, dtype, chosen, plain, triton_kernels(gpu.pdl))


def _any_device(scheme: Scheme) -> LinearMethod:
    return EightBitMethod(scheme) if isinstance(scheme, EightBitScheme) else Int4Method(scheme)
