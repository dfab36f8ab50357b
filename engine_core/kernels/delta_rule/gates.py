"""Gates of the outputs of recurrent layers and of attention.

Oracles: `reference.delta_rule.gated_norm` and `sigmoid_gate`. `pdl`: see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.delta_rule.state import TokenRows
from tandem.engine_core.kernels.dependent_launch import wait_for_previous

HEADS_PER_PROGRAM = 8
BLOCK = 1024


@triton.jit
def _gated_norm_kernel(
    out_ptr,
    o_ptr,
    gate_ptr,
    weight_ptr,
    rows_ptr,
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = head[:, None] * V + tl.arange(0, V)[None, :]
    inside = (head < HEADS)[:, None] & (column >= 0)
    weight = tl.load(weight_ptr + tl.arange(0, V)).to(tl.float32)
    # The preceding kernel writes only o.
    is_token = tl.load(rows_ptr + token) > 0
    gate = tl.load(gate_ptr + token * gate_stride + column, mask=inside & is_token, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    o = tl.load(o_ptr + token * (HEADS * V) + column, mask=inside & is_token, other=0.0)
    dtype: tl.constexpr = o.dtype
    wide = o.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 1) / V + eps)[:, None]).to(dtype).to(tl.float32)
    normed = (normed * weight[None, :]).to(dtype).to(tl.float32)
    tl.store(out_ptr + token * (HEADS * V) + column, (normed * gate * tl.sigmoid(gate)).to(dtype), mask=inside)


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, tokens: TokenRows, pdl: bool = False) -> Tensor:
    """Return the RMSNorm of each value head times silu(gate), and zeros for padding; see the oracle.

    o: contiguous, its size of heads a power of two, and all that the preceding kernel may write with `pdl`.
    """
    count, heads, size = o.shape
    out = torch.empty(count, heads * size, dtype=o.dtype, device=o.device)
    if count:
        _gated_norm_kernel[(count, triton.cdiv(heads, HEADS_PER_PROGRAM))](
            *(out, o, gate, weight, tokens.rows, gate.stride(0), eps),
            HEADS=heads,
            V=size,
            BLOCK=HEADS_PER_PROGRAM,
            PDL=pdl,
            num_warps=4,
            **({"launch_pdl": True} if pdl else {}),
        )
    return out


@triton.jit
def _sigmoid_gate_kernel(
    out_ptr,
    x_ptr,
    gate_ptr,
    token_stride,
    head_stride,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    # The preceding kernel writes only x.
    gate = tl.load(gate_ptr + token * token_stride + column // D * head_stride + column % D, mask=mask, other=0.0)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + token * WIDTH + column, mask=mask, other=0.0)
    # Round the sigmoid before the multiplication, as transformers does.
    product = x.to(tl.float32) * tl.sigmoid(gate.to(tl.float32)).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + column, product.to(x.dtype), mask=mask)


def sigmoid_gate(x: Tensor, gate: Tensor, pdl: bool = False) -> Tensor:
    """Return x * sigmoid(gate), shaped like x; see the oracle.

    x: contiguous, and all that the preceding kernel may write with `pdl`.
    """
    count, width = x.shape
    out = torch.empty_like(x)
    if count:
        _sigmoid_gate_kernel[(count, triton.cdiv(width, BLOCK))](
            *(out, x, gate, gate.stride(0), gate.stride(1)),
            WIDTH=width,
            D=gate.shape[2],
            BLOCK=BLOCK,
            PDL=pdl,
            num_warps=4,
            **({"launch_pdl": True} if pdl else {}),
        )
    return out
