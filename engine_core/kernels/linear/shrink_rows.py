"""Inputs of few tokens times A of their adapters: LoRA (Hu et al., 2021).

One program multiplies a token by a rank of its adapter, as a GEMV does, with the norm before the projection.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.linear.gemv import input_mode, input_vector
from tandem.engine_core.kernels.lora.lora_updates import LoraUpdates
from tandem.engine_core.kernels.lora.low_rank_update import LowRankUpdate

_BLOCK_K = 2048
"""Smallest number of inputs of a program, without a norm."""
_MAX_SPLIT = 8


@triton.jit
def _shrink_rows_kernel(
    x_ptr,
    a_ptr,
    ranks_ptr,
    slots_ptr,
    x_weight_ptr,
    norm_weight_ptr,
    residual_ptr,
    sums_ptr,
    eps,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply a token by one row of A of its adapter.

    x: [T, K]; a: [S, PARTS, MAX_RANK, K]; ranks: [S + 1, PARTS]; slots: [T]; sums: [splits, T, PARTS * MAX_RANK]
    float32; MODE and the tensors that it needs: as in `gemv.gemv_kernel`. Program (j, s, t) computes part s of the
    inputs of token t for row j of A.
    """
    row, split, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    offs_k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    slot = tl.load(slots_ptr + token)
    rank = tl.load(ranks_ptr + slot * PARTS + row // MAX_RANK)
    is_used = row % MAX_RANK < rank
    a_row = ((slot - 1) * (PARTS * MAX_RANK) + row).to(tl.int64) * K
    a = tl.load(a_ptr + a_row + offs_k, mask=mask_k & is_used, other=0.0)
    x_weight = ()
    norm_weight = ()
    if MODE > 0:
        norm_weight = (tl.load(norm_weight_ptr + offs_k, mask=mask_k, other=0.0),)
    if MODE == 3:
        x_weight = (tl.load(x_weight_ptr + offs_k, mask=mask_k, other=0.0),)
    wait_for_previous(PDL)
    if is_used:
        vector = input_vector(
            x_ptr + token * K,
            residual_ptr + token * K,
            x_ptr,
            False,
            x_weight_ptr,
            norm_weight_ptr,
            x_weight,
            norm_weight,
            eps,
            offs_k,
            mask_k,
            K,
            1,
            BLOCK_K,
            MODE,
        )
        total = tl.sum(a.to(tl.float32) * vector[0], 0)
        width = PARTS * MAX_RANK
        tl.store(sums_ptr + (split * tl.num_programs(2) + token) * width + row, total)


def shrink_rows(
    x: Tensor,
    residual: Tensor | None,
    x_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    lora: LoraUpdates,
    pdl: bool = False,
) -> LowRankUpdate:
    """Multiply the inputs by A of each token's adapter.

    x, residual, x_weight, norm_weight: as in `gemv.normed_gemv`; without a norm if norm_weight is None.
    """
    (tokens, inputs), (_, parts, max_rank, _) = x.shape, lora.a.shape
    whole = triton.next_power_of_2(inputs)
    block = whole if norm_weight is not None else min(whole, max(_BLOCK_K, whole // _MAX_SPLIT))
    assert x.is_contiguous()
    splits = triton.cdiv(inputs, block)
    sums = torch.empty(splits, tokens, parts * max_rank, dtype=torch.float32, device=x.device)
    given = (x if one is None else one for one in (x_weight, norm_weight, residual))
    _shrink_rows_kernel[(parts * max_rank, splits, tokens)](
        x,
        lora.a,
        lora.ranks,
        lora.tokens.slots,
        *given,
        sums,
        eps,
        K=inputs,
        PARTS=parts,
        MAX_RANK=max_rank,
        BLOCK_K=block,
        MODE=input_mode(norm_weight, residual, x_weight),
        PDL=pdl,
        num_warps=8 if block >= 4096 else 4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return LowRankUpdate(lora, sums)
