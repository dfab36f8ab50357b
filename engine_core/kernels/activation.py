"""The products of gated feed-forward networks in Triton: SwiGLU and GeGLU (Shazeer, 2020).

Oracles: `reference.silu_mul`, `reference_activation.gelu_mul`. `pdl`: see the head of `kernels.norm`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4
SMALL_BLOCK, SMALL_WARPS = 256, 1
SMALL = 1 << 17
"""Up to this many outputs a launch takes small blocks: more multiprocessors share the few bytes."""


@triton.jit
def _gated_kernel(
    out,
    gate_up,
    row_stride,
    width,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = gate_up + row * row_stride + columns
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    if GELU:
        # (1 + tanh(u)) / 2 is sigmoid(2u), which needs no tanh.
        turned = wide * tl.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide * wide * wide))
    else:
        turned = wide * tl.sigmoid(wide)
    # Rounded before the product, as the oracle and transformers do.
    product = turned.to(gate.dtype).to(tl.float32) * up
    tl.store(out + row * width + columns, product.to(gate.dtype), mask=inside)


def silu_mul(gate_up: Tensor, pdl: bool = False) -> Tensor:
    """silu(gate) * up. gate_up: [T, 2 * width], gate first, rows contiguous, float32, bfloat16 or float16.

    Returns [T, width], contiguous. ValueError for scattered rows or an odd width.
    """
    return _launch(gate_up, False, pdl)


def gelu_mul(gate_up: Tensor, pdl: bool = False) -> Tensor:
    """gelu(gate) * up with the tanh approximation of GELU (Hendrycks and Gimpel, 2016). Shapes as in `silu_mul`."""
    return _launch(gate_up, True, pdl)


def _launch(gate_up: Tensor, gelu: bool, pdl: bool) -> Tensor:
    tokens, both = gate_up.shape
    if both % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate and up must lie beside each other in a row, not {tuple(gate_up.shape)}")
    width = both // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if tokens == 0:
        return out
    block, warps = (SMALL_BLOCK, SMALL_WARPS) if tokens * width <= SMALL else (BLOCK, WARPS)
    _gated_kernel[(tokens, triton.cdiv(width, block))](
        out,
        gate_up,
        gate_up.stride(0),
        width,
        GELU=gelu,
        BLOCK=block,
        PDL=pdl,
        num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
