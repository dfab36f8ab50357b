"""Products of gated feed-forward networks in Triton: SwiGLU and GeGLU.

Paper: Shazeer, 2020. Oracle: `reference.layer.gated_activation`. For `pdl`, see the head of `kernels.norm`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.dependent_launch import wait_for_previous

BLOCK, WARPS = 1024, 4
SMALL_BLOCK, SMALL_WARPS = 256, 1
SMALL = 1 << 17
"""Largest number of outputs for which a launch takes small blocks, so that more multiprocessors share the few bytes."""


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Apply an activation to float32 values. ACTIVATION: a number of `Activation`."""
    logit = x
    if ACTIVATION == 2:
        # (1 + tanh(u)) / 2 is sigmoid(2u), which needs no tanh.
        logit = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(logit)


@triton.jit
def _gated_activation_kernel(
    out_ptr,
    gate_up_ptr,
    row_stride,
    width,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < width
    wait_for_previous(PDL)
    source = gate_up_ptr + row * row_stride + offs
    gate = tl.load(source, mask=mask, other=0.0)
    up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    # Rounded before the product, as the oracle and transformers do.
    product = activated(gate.to(tl.float32), ACTIVATION).to(gate.dtype).to(tl.float32) * up
    tl.store(out_ptr + row * width + offs, product.to(gate.dtype), mask=mask)


def gated_activation(gate_up: Tensor, activation: Activation, pdl: bool = False) -> Tensor:
    """Return activation(gate) * up, [T, width], contiguous.

    gate_up: [T, 2 * width], gate first, rows contiguous, float32, bfloat16 or float16. Raises ValueError for rows that
    are not contiguous and for an odd number of columns.
    """
    tokens, both = gate_up.shape
    if both % 2 or gate_up.stride(1) != 1:
        raise ValueError(
            f"gate and up must be the contiguous halves of each row, found {tuple(gate_up.shape)} with strides "
            f"{gate_up.stride()}"
        )
    width = both // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if tokens == 0:
        return out
    block, warps = (SMALL_BLOCK, SMALL_WARPS) if tokens * width <= SMALL else (BLOCK, WARPS)
    _gated_activation_kernel[(tokens, triton.cdiv(width, block))](
        out,
        gate_up,
        gate_up.stride(0),
        width,
        ACTIVATION=activation.value,
        BLOCK=block,
        PDL=pdl,
        num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
