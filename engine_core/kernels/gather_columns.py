"""Permutation of columns in Triton.

Oracle: `reference.layer.gather_columns`. `pdl`: see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous

BLOCK, WARPS = 1024, 4


@triton.jit
def _gather_columns_kernel(
    out_ptr,
    x_ptr,
    order_ptr,
    row_stride,
    width,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < width
    # No kernel writes the order, so load it while the previous kernel still runs.
    places = tl.load(order_ptr + offs, mask=mask, other=0)
    wait_for_previous(PDL)
    tl.store(out_ptr + row * width + offs, tl.load(x_ptr + row * row_stride + places, mask=mask), mask=mask)


def gather_columns(x: Tensor, order: Tensor, pdl: bool = False) -> Tensor:
    """Return columns of x in the given order, [T, width], contiguous.

    x: [T, inputs], rows contiguous, of any dtype; order: column indices, [width] int32, contiguous; not bounds-checked.
    With `pdl` the preceding kernel may write x, but not the order. Raises ValueError for non-contiguous rows, and for
    an order of another dtype or layout.
    """
    if x.stride(1) != 1 or order.dtype != torch.int32 or not order.is_contiguous():
        raise ValueError(
            f"gather_columns needs contiguous rows and an int32 order, found {tuple(x.shape)} with strides "
            f"{x.stride()} and an order of {order.dtype} with strides {order.stride()}"
        )
    tokens, width = x.shape[0], order.shape[0]
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    _gather_columns_kernel[(tokens, triton.cdiv(width, BLOCK))](
        out,
        x,
        order,
        x.stride(0),
        width,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
