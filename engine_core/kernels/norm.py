"""RMSNorm in Triton, alone and fused.

It can be fused with the residual addition before it and with the quantization after it. Each program keeps one row in
registers, so memory is read once. Oracles: `reference.layer.rms_norm`, `add_rms_norm` and `norm_add_rms_norm`, and
`reference.quantized_activation.quantized_norm`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.quantize import group_of, store_quantized
from tandem.engine_core.kernels.quantized_activation import (
    ActivationFormat,
    QuantizedActivation,
    empty_quantized_activation,
)

MAX_HIDDEN = 16384
WARPS = {1024: 2, 2048: 4, 4096: 8, 8192: 16, 16384: 16}
"""Number of warps by hidden size, padded to a power of two; smaller sizes use one or two."""


@triton.jit
def normalize(x, weight, eps, hidden: tl.constexpr, dtype: tl.constexpr):
    """Return the RMSNorm of one row, [BLOCK] of `dtype`.

    Rounds like `reference.layer.rms_norm`. x: [BLOCK] float32, 0 past `hidden`; weight: [BLOCK], as stored.
    """
    quotient = x * tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    return (quotient.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=["scale_stride"])
def _rms_norm_kernel(
    normed_ptr,
    total_ptr,
    values_ptr,
    x_ptr,
    residual_ptr,
    x_weight_ptr,
    weight_ptr,
    scales_ptr,
    order_ptr,
    x_stride,
    residual_stride,
    scale_stride,
    eps,
    hidden: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    NORM_X: tl.constexpr,
    STORE: tl.constexpr,
    QUANT: tl.constexpr,
    GROUP: tl.constexpr,
    ORDERED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize one row. STORE: write the norm in x's dtype; QUANT: write it quantized, as values with scales."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < hidden
    # No kernel writes the weights or the order, so load them while the previous kernel still runs.
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
    if NORM_X:
        x_weight = tl.load(x_weight_ptr + offs, mask=mask, other=0.0)
    if ORDERED:
        order = tl.load(order_ptr + offs, mask=mask, other=0)
    wait_for_previous(PDL)
    total = tl.load(x_ptr + row * x_stride + offs, mask=mask, other=0.0)
    if NORM_X:
        total = normalize(total.to(tl.float32), x_weight, eps, hidden, total.dtype)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + offs, mask=mask, other=0.0)
        total = (total.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)
        tl.store(total_ptr + row * hidden + offs, total, mask=mask)
    normed = normalize(total.to(tl.float32), weight, eps, hidden, total.dtype)
    if ORDERED:
        normed = tl.gather(normed, order, 0)
    if QUANT:
        result = tl.where(mask, normed.to(tl.float32), 0.0)
        store_quantized(values_ptr, scales_ptr, row, 0, result, hidden, scale_stride, GROUP, BLOCK)
    if STORE:
        tl.store(normed_ptr + row * hidden + offs, normed, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, order: Tensor | None = None, pdl: bool = False) -> Tensor:
    """Return the RMSNorm of each row, [T, hidden], contiguous.

    Oracle: `reference.layer.rms_norm`.

    x: [T, hidden], rows contiguous, float32, bfloat16 or float16; weight: [hidden], in x's dtype or float32. order:
    permutation applied to the output's columns, [hidden] int32, contiguous, here and below. Raises ValueError for a
    hidden size above 16384 and for non-contiguous rows.
    """
    normed = _empty_like(x)
    _launch(normed, None, x, None, None, weight, eps, pdl, order=order)
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, order: Tensor | None = None, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalize the sum.

    Returns the norm of the rounded sum, and the sum, both newly allocated. All are [T, hidden] as in `rms_norm`.
    Oracle: `reference.layer.add_rms_norm`.
    """
    normed, total = _empty_like(x), _empty_like(x)
    _launch(normed, total, x, residual, None, weight, eps, pdl, order=order)
    return normed, total


def norm_add_rms_norm(
    x: Tensor,
    x_weight: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    order: Tensor | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalize x, add it to the residual stream and normalize the sum.

    Returns the same as `add_rms_norm`. x_weight: [hidden], in the weight's dtype. Oracle:
    `reference.layer.norm_add_rms_norm`.
    """
    normed, total = _empty_like(x), _empty_like(x)
    _launch(normed, total, x, residual, x_weight, weight, eps, pdl, order=order)
    return normed, total


def quantized_norm(
    x: Tensor,
    residual: Tensor | None,
    x_weight: Tensor | None,
    weight: Tensor,
    eps: float,
    to: ActivationFormat,
    pdl: bool = False,
) -> tuple[QuantizedActivation, Tensor]:
    """Add x to the residual stream, normalize the sum and quantize the norm.

    The norm is not written in x's dtype. Returns the quantized rows, and the sum as in `add_rms_norm` (x itself without
    a residual). x_weight: weight of a norm of x before the addition. Oracle:
    `reference.quantized_activation.quantized_norm`.
    """
    rows = empty_quantized_activation(x.shape[0], x.shape[1], x.dtype, to, x.device)
    total = None if residual is None else _empty_like(x)
    _launch(None, total, x, residual, x_weight, weight, eps, pdl, rows, group_of(to))
    return rows, x if total is None else total


def add_rms_norm_and_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, to: ActivationFormat, pdl: bool = False
) -> tuple[Tensor, Tensor, QuantizedActivation]:
    """Return `add_rms_norm`, and the norm quantized as well."""
    normed, total = _empty_like(x), _empty_like(x)
    rows = empty_quantized_activation(x.shape[0], x.shape[1], x.dtype, to, x.device)
    _launch(normed, total, x, residual, None, weight, eps, pdl, rows, group_of(to))
    return normed, total, rows


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _launch(
    normed: Tensor | None,
    total: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    x_weight: Tensor | None,
    weight: Tensor,
    eps: float,
    pdl: bool,
    rows: QuantizedActivation | None = None,
    group: int = 0,
    order: Tensor | None = None,
) -> None:
    """Check the kernel's preconditions and launch it.

    x and weight are passed for tensors that a variant does not use. normed, rows: written if given; group: of the
    quantization, see `quantize`.
    """
    tokens, hidden = x.shape
    stream = x if residual is None else residual
    if hidden > MAX_HIDDEN or x.stride(1) != 1 or stream.stride(1) != 1:
        raise ValueError(
            f"rms_norm needs contiguous rows of at most {MAX_HIDDEN} elements, found {tuple(x.shape)} with strides "
            f"{x.stride()}"
        )
    assert order is None or (order.dtype, order.shape, order.stride()) == (torch.int32, (hidden,), (1,))
    if tokens == 0:
        return
    block = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(tokens,)](
        x if normed is None else normed,
        x if total is None else total,
        x if rows is None else rows.values,
        x,
        stream,
        weight if x_weight is None else x_weight,
        weight,
        weight if rows is None else rows.scales,
        weight if order is None else order,
        x.stride(0),
        stream.stride(0),
        tokens if rows is None else len(rows.values),
        eps,
        hidden,
        BLOCK=block,
        ADD=residual is not None,
        NORM_X=x_weight is not None,
        STORE=normed is not None,
        QUANT=rows is not None,
        GROUP=group,
        ORDERED=order is not None,
        PDL=pdl,
        num_warps=WARPS.get(block, 1 if block <= 256 else 2),
        **({"launch_pdl": True} if pdl else {}),
    )
