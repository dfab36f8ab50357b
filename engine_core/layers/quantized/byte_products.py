"""Products of bytes with bytes, in a library's kernels."""

import torch
from torch import Tensor

from tandem.engine_core.quantization.scheme import FP8_MAX, INT8_MAX


def rounded_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round each row to the range of a byte.

    Return the values, and the scale of each row, [T, 1] float32. x: [T, inputs]; dtype: float8_e4m3fn or int8.
    """
    top = INT8_MAX if dtype == torch.int8 else FP8_MAX
    # A row of zeros would divide by zero.
    scales = (x.abs().amax(1, keepdim=True).float() / top).clamp(min=torch.finfo(torch.float32).tiny)
    values = x.float() / scales
    if dtype == torch.int8:
        values = values.round()
    return values.clamp(-top, top).to(dtype), scales


def byte_product(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b with x rounded for each row, [T, outputs].

    x: [T, inputs] bfloat16; values: [outputs, inputs], float8_e4m3fn or int8; scales: [outputs] float32; bias:
    [outputs].
    """
    rows, row_scales = rounded_rows(x, values.dtype)
    if values.dtype != torch.int8:
        return torch._scaled_mm(rows, values.t(), row_scales, scales[None], bias, out_dtype=x.dtype)
    sums = torch._int_mm(rows, values.t()).float() * row_scales * scales
    return (sums if bias is None else sums + bias).to(x.dtype)
