"""Rounding of a product's inputs to one byte in plain torch.

It is the oracle of the kernels that do so.
"""

import torch
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.quantized_activation import (
    ActivationFormat,
    QuantizedActivation,
    empty_quantized_activation,
)
from tandem.engine_core.kernels.reference.layer import add_rms_norm, gated_activation, norm_add_rms_norm, rms_norm


def quantize(x: Tensor, to: ActivationFormat) -> QuantizedActivation:
    """Round rows to one byte.

    A scale that is not known beforehand brings the largest number of its row or group to the top of the dtype. Numbers
    past the top become the top. x: [T, inputs].
    """
    rows = empty_quantized_activation(x.shape[0], x.shape[1], x.dtype, to, x.device)
    grouped = x.float() if to.group is None else x.float().unflatten(1, (-1, to.group))
    if to.scale is None:
        # Zeros alone would divide by zero.
        largest = grouped.abs().amax(-1) / to.top
        scales = largest.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        rows.scales[: x.shape[0]] = scales.reshape(x.shape[0], -1)
    else:
        scales = to.scale
    values = (grouped / scales).clamp(-to.top, to.top).reshape(x.shape)
    rows.values[: x.shape[0]] = (values.round() if to.dtype == torch.int8 else values).to(to.dtype)
    return rows


def quantized_norm(
    x: Tensor, residual: Tensor | None, x_weight: Tensor | None, weight: Tensor, eps: float, to: ActivationFormat
) -> tuple[QuantizedActivation, Tensor]:
    """Add x to the residual stream, and normalise and round the sum.

    Return the rounded rows and the sum. residual None: x starts the stream; x_weight: x is normalised with these
    factors before it is added, [hidden]. The rest is as in `layer.rms_norm`.
    """
    if residual is None:
        return quantize(rms_norm(x, weight, eps), to), x
    if x_weight is None:
        normed, total = add_rms_norm(x, residual, weight, eps)
    else:
        normed, total = norm_add_rms_norm(x, x_weight, residual, weight, eps)
    return quantize(normed, to), total


def quantized_gate(gate_up: Tensor, activation: Activation, to: ActivationFormat) -> QuantizedActivation:
    """Round `layer.gated_activation`.

    gate_up: [T, 2 * width].
    """
    return quantize(gated_activation(gate_up, activation), to)


def quantized_matmul(
    rows: QuantizedActivation, values: Tensor, scales: Tensor, bias: Tensor | None, scale_rows: int | None = None
) -> Tensor:
    """Return the product of rows and a transposed weight, [T, outputs].

    It is computed in float32. values: [outputs, inputs]; scales: float32, of each output, or of blocks of `scale_rows`
    outputs and 128 inputs, [outputs / scale_rows, inputs / 128], rounded up; bias: [outputs].
    """
    outputs, inputs = values.shape
    if scale_rows is None:
        spread = scales[:, None]
    else:
        spread = scales.repeat_interleave(scale_rows, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
    product = rows.numbers() @ (values.float() * spread).t()
    return (product if bias is None else product + bias.float()).to(rows.dtype)
