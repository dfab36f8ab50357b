"""Products of bytes with bytes, in a library's kernels."""

import torch
from torch import Tensor

from tandem.engine_core.kernels.quantized_activation import QuantizedActivation


def library_matmul(x: QuantizedActivation, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b, [T, outputs], in the dtype that x was rounded from.

    values: [outputs, inputs], float8_e4m3fn or int8, inputs and outputs multiples of 16; scales: float32, of each
    output, [outputs]; of all, [1], where x has one scale too; or of blocks, [outputs / 128, inputs / 128], rounded up,
    with x in groups of 128, inputs a multiple of 512, and a Hopper GPU. bias: [outputs]. Oracle:
    `kernels.reference.quantized_activation.quantized_matmul`.
    """
    weight, dtype = values.t(), x.dtype
    if values.dtype == torch.int8:
        sums = torch._int_mm(x.values, weight).float() * x.scales * scales
        return (sums if bias is None else sums + bias).to(dtype)
    if scales.ndim == 2:
        product = torch._scaled_mm(x.values, weight, x.scales, scales.t(), out_dtype=dtype)[: x.count]
        return product if bias is None else product.add_(bias)
    if scales.numel() == 1 and x.scales.numel() == 1:
        return torch._scaled_mm(x.values, weight, x.scales, scales, bias, out_dtype=dtype)
    row_scales = x.scales.expand(x.count, 1).contiguous()
    return torch._scaled_mm(x.values, weight, row_scales, scales.expand(values.shape[0])[None], bias, out_dtype=dtype)
