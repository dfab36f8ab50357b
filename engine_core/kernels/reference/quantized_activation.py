"""Quantization of activations in plain torch, the oracle of the kernels."""

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
    """Quantize rows to 8 bits.

    A dynamic scale maps the absolute maximum of its row or group to the largest value of the dtype. Values out of range
    are clamped. x: [T, inputs].
    """
    rows = empty_quantized_activation(x.shape[0], x.shape[1], x.dtype, to, x.device)
    grouped = x.float() if to.group is None else x.float().unflatten(1, (-1, to.group))
    if to.scale is None:
        # Avoid a division by zero for all-zero rows.
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
    """Add x to the residual stream, normalize the sum and quantize the norm.

    Return the quantized rows and the sum. residual None: x starts the stream; x_weight: weight of a norm of x before
    the addition, [hidden]. Other arguments are as in `layer.rms_norm`.
    """
    if residual is None:
        return quantize(rms_norm(x, weight, eps), to), x
    if x_weight is None:
        normed, total = add_rms_norm(x, residual, weight, eps)
    else:
        normed, total = norm_add_rms_norm(x, x_weight, residual, weight, eps)
    return quantize(normed, to), total


def quantized_gate(gate_up: Tensor, activation: Activation, to: ActivationFormat) -> QuantizedActivation:
    """Return `layer.gated_activation`, quantized.

    gate_up: [T, 2 * width].
    """
    return quantize(gated_activation(gate_up, activation), to)


def quantized_matmul(
    rows: QuantizedActivation, values: Tensor, scales: Tensor, bias: Tensor | None, scale_rows: int | None = None
) -> Tensor:
    """Return the matmul of quantized rows and a transposed weight, [T, outputs].

    Computed in float32. values: [outputs, inputs]; scales: float32, per output, or per block of `scale_rows` outputs
    and 128 inputs, [outputs / scale_rows, inputs / 128], rounded up; bias: [outputs].
    """
    outputs, inputs = values.shape
    if scale_rows is None:
        spread = scales[:, None]
    else:
        spread = scales.repeat_interleave(scale_rows, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
    y = rows.dequantize() @ (values.float() * spread).t()
    return (y if bias is None else y + bias.float()).to(rows.dtype)
