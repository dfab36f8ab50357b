"""Gather the sampled tokens of a step in one Triton launch.

`pdl`: see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous

BLOCK = 1024
"""Elements of a hidden state that a program copies at a time."""


def gather_samples_reference(
    hidden: Tensor, rows: Tensor, positions: Tensor, index: Tensor, sample_rows: Tensor, sample_positions: Tensor
) -> Tensor:
    """Return the hidden states of the sampled tokens, [P, hidden].

    hidden: [T, hidden]; rows, positions: [T] int32, of the tokens; index: [P] int32, a token for each sample slot,
    negative for an unused one. sample_rows, sample_positions: [P] int32, written: row and position of each slot's
    token; an unused slot gets those of padding (0), and the state of token 0.
    """
    token = index.clamp(min=0).long()
    sample_rows.copy_(torch.where(index >= 0, rows[token], 0))
    sample_positions.copy_(torch.where(index >= 0, positions[token], 0))
    return hidden[token]


@triton.jit
def _gather_samples_kernel(
    out_ptr,
    sample_rows_ptr,
    sample_positions_ptr,
    hidden_ptr,
    rows_ptr,
    positions_ptr,
    index_ptr,
    hidden_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    slot = tl.program_id(0)
    wait_for_previous(PDL)
    index = tl.load(index_ptr + slot)
    token = tl.maximum(index, 0)
    row, position = tl.load(rows_ptr + token), tl.load(positions_ptr + token)
    tl.store(sample_rows_ptr + slot, tl.where(index >= 0, row, 0))
    tl.store(sample_positions_ptr + slot, tl.where(index >= 0, position, 0))
    source_ptr = hidden_ptr + token.to(tl.int64) * hidden_stride
    for first in range(0, WIDTH, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        state = tl.load(source_ptr + offs, mask=offs < WIDTH)
        tl.store(out_ptr + slot.to(tl.int64) * WIDTH + offs, state, mask=offs < WIDTH)


def gather_samples(
    hidden: Tensor,
    rows: Tensor,
    positions: Tensor,
    index: Tensor,
    sample_rows: Tensor,
    sample_positions: Tensor,
    pdl: bool = False,
) -> Tensor:
    """Return the states of the sampled tokens; see `gather_samples_reference`.

    All tensors are contiguous. Indices are below T; this is not checked, since they are on the device.
    """
    slots, width = len(index), hidden.shape[1]
    out = torch.empty(slots, width, dtype=hidden.dtype, device=hidden.device)
    if slots:
        _gather_samples_kernel[(slots,)](
            out,
            sample_rows,
            sample_positions,
            hidden,
            rows,
            positions,
            index,
            hidden.stride(0),
            WIDTH=width,
            BLOCK=min(BLOCK, triton.next_power_of_2(width)),
            PDL=pdl,
            num_warps=4,
            **({"launch_pdl": True} if pdl else {}),
        )
    return out
