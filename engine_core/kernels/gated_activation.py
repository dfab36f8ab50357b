"""Gated activations in Triton: SwiGLU and GeGLU.

Paper: Shazeer, 2020. Oracles: `reference.layer.gated_activation`, and `reference.quantized_activation.quantized_gate`.
`pdl`: see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.quantize import group_of, row_block, store_quantized
from tandem.engine_core.kernels.quantized_activation import (
    ActivationFormat,
    QuantizedActivation,
    empty_quantized_activation,
)

BLOCK, WARPS = 1024, 4
SMALL_BLOCK, SMALL_WARPS = 256, 1
SMALL = 1 << 17
"""Maximum number of outputs for which a launch uses small blocks, to spread the work over more SMs."""


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Apply an activation to float32 values. ACTIVATION: value of `Activation`."""
    logit = x
    if ACTIVATION == 2:
        # (1 + tanh(u)) / 2 is sigmoid(2u), which needs no tanh.
        logit = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(logit)


@triton.jit
def _gated_activation_kernel(
    out_ptr,
    scales_ptr,
    gate_up_ptr,
    row_stride,
    width,
    scale_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANT: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    offs = first + tl.arange(0, BLOCK)
    mask = offs < width
    wait_for_previous(PDL)
    source = gate_up_ptr + row * row_stride + offs
    gate = tl.load(source, mask=mask, other=0.0)
    up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    # Round before the multiplication, as the oracle and transformers do.
    product = activated(gate.to(tl.float32), ACTIVATION).to(gate.dtype).to(tl.float32) * up
    if QUANT:
        result = product.to(gate.dtype).to(tl.float32)
        store_quantized(out_ptr, scales_ptr, row, first, result, width, scale_stride, GROUP, BLOCK)
    else:
        tl.store(out_ptr + row * width + offs, product.to(gate.dtype), mask=mask)


def gated_activation(gate_up: Tensor, activation: Activation, pdl: bool = False) -> Tensor:
    """Return activation(gate) * up, [T, width], contiguous.

    gate_up: [T, 2 * width], gate first, rows contiguous, float32, bfloat16 or float16. Raises ValueError for
    non-contiguous rows and an odd number of columns.
    """
    width = _checked_width(gate_up)
    tokens = gate_up.shape[0]
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    block, warps = (SMALL_BLOCK, SMALL_WARPS) if tokens * width <= SMALL else (BLOCK, WARPS)
    _launch(out, None, gate_up, activation, block, warps, pdl)
    return out


def quantized_gate(
    gate_up: Tensor, activation: Activation, to: ActivationFormat, pdl: bool = False
) -> QuantizedActivation:
    """Return activation(gate) * up quantized to 8 bits.

    It is not written in its own dtype. gate_up, errors: as in `gated_activation` and `quantize`. Oracle:
    `reference.quantized_activation.quantized_gate`.
    """
    width = _checked_width(gate_up)
    rows = empty_quantized_activation(gate_up.shape[0], width, gate_up.dtype, to, gate_up.device)
    group = group_of(to)
    block, warps = row_block(width, group)
    _launch(rows.values, rows.scales, gate_up, activation, block, warps, pdl, group)
    return rows


def _checked_width(gate_up: Tensor) -> int:
    """Return the number of outputs of a gate."""
    both = gate_up.shape[1]
    if both % 2 or gate_up.stride(1) != 1:
        raise ValueError(
            f"gate and up must be the contiguous halves of each row, found {tuple(gate_up.shape)} with strides "
            f"{gate_up.stride()}"
        )
    return both // 2


def _launch(
    out: Tensor,
    scales: Tensor | None,
    gate_up: Tensor,
    activation: Activation,
    block: int,
    warps: int,
    pdl: bool,
    group: int = 0,
) -> None:
    """Launch the kernel, except for zero rows.

    scales, group: of the quantization, see `quantize`.
    """
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    if tokens == 0:
        return
    _gated_activation_kernel[(tokens, triton.cdiv(width, block))](
        out,
        out if scales is None else scales,
        gate_up,
        gate_up.stride(0),
        width,
        out.shape[0],
        ACTIVATION=activation.value,
        BLOCK=block,
        QUANT=scales is not None,
        GROUP=group,
        PDL=pdl,
        num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )
