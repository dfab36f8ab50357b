"""Soft cap of logits in Triton, as in Gemma 2.

Paper: Gemma Team, 2024. Oracle: `reference.layer.soft_cap`. `pdl`: see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous

BLOCK, WARPS = 2048, 4


@triton.jit
def _soft_cap_kernel(logits_ptr, count, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    wait_for_previous(PDL)
    logits = tl.load(logits_ptr + offs, mask=mask, other=0.0)
    dtype: tl.constexpr = logits.dtype
    # Round after each operation, as the oracle and transformers do. tanh(x) = 2 sigmoid(2 x) - 1.
    share = (logits.to(tl.float32) / cap).to(dtype).to(tl.float32)
    bent = (2 * tl.sigmoid(2 * share) - 1).to(dtype).to(tl.float32)
    tl.store(logits_ptr + offs, (bent * cap).to(dtype), mask=mask)


def soft_cap(logits: Tensor, cap: float, pdl: bool = False) -> Tensor:
    """Replace logits by cap * tanh(logits / cap) in place, and return them.

    logits: contiguous, float32, bfloat16 or float16. Raises ValueError if they are not contiguous.
    """
    if not logits.is_contiguous():
        raise ValueError(
            f"logits must be contiguous, found {tuple(logits.shape)} with strides {logits.stride()}; copy them first"
        )
    count = logits.numel()
    if count:
        _soft_cap_kernel[(triton.cdiv(count, BLOCK),)](
            logits, count, cap, BLOCK=BLOCK, PDL=pdl, num_warps=WARPS, **({"launch_pdl": True} if pdl else {})
        )
    return logits
