"""The sum of a mixture's output and its gated shared expert, in Triton.

Oracle: `reference.moe.add_shared_expert`. `pdl`: see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous


@triton.jit
def _add_shared_expert_kernel(
    out_ptr, x_ptr, gate_ptr, shared_ptr, routed_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Compute one token. x, shared, routed, out: [T, width]; gate: [width]."""
    row = tl.program_id(0).to(tl.int64) * width
    offs = tl.arange(0, BLOCK)
    mask = offs < width
    gate = tl.load(gate_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
    shared = tl.load(shared_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
    routed = tl.load(routed_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
    total = routed + tl.sigmoid(tl.sum(x * gate, 0)) * shared
    tl.store(out_ptr + row + offs, total.to(out_ptr.dtype.element_ty), mask=mask)


def add_shared_expert(x: Tensor, gate: Tensor, shared: Tensor, routed: Tensor, pdl: bool = False) -> Tensor:
    """Return routed + sigmoid(gate(x)) * shared; see the oracle. All are contiguous."""
    tokens, width = x.shape
    assert x.is_contiguous() and shared.is_contiguous() and routed.is_contiguous() and gate.shape == (1, width)
    out = torch.empty_like(routed)
    if tokens:
        block = triton.next_power_of_2(width)
        _add_shared_expert_kernel[(tokens,)](
            *(out, x, gate, shared, routed, width),
            BLOCK=block,
            PDL=pdl,
            num_warps=min(8, max(1, block // 256)),
            **({"launch_pdl": True} if pdl else {}),
        )
    return out
