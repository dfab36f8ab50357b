"""Spare programs of decode attention, for rows much longer than others.

Where rows alone fill the device, each has few programs. A long row among them would hold up the step, and as many
programs for every row as the longest possible one needs would nearly all find nothing to do: at 131,072 positions seven
of eight. So a launch has a fixed number of spare programs, and a kernel gives them to long rows once a step.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.dependent_launch import wait_for_previous

BALANCE = 16384
"""Positions of a row that call for one more program, unless there are too few spare ones: then twice as many do, or
four times, and so on."""


@dataclass(frozen=True, slots=True)
class ExtraSplits:
    """The spare programs of a step, as `assign_extra_splits` gave them to rows.

    A captured graph keeps reading its tensor.
    """

    plan: Tensor
    """[2 * B + count] int32 on the device: of each row its first spare program and their number, then of each spare
    program its row, or -1."""
    count: int
    """Number of spare programs of a KV head, a multiple of the splits."""


def choose_spares(batch: int, kv_heads: int, multiprocessors: int, longest: int, splits: int) -> int:
    """Return the number of spare programs of a KV head, a multiple of `splits`.

    All heads together fill the device about once: long rows that are more than these fill it themselves. longest: the
    longest context possible, in positions; splits: programs that every row has.
    """
    if not batch or ceil_div(longest, BALANCE) <= splits:
        return 0
    return splits * ceil_div(ceil_div(multiprocessors, kv_heads), splits)


def reach_without_spares(splits: int) -> int:
    """Return the positions up to which a row is given no spare program.

    splits: programs that every row has.
    """
    return splits * BALANCE


@triton.jit(do_not_specialize=["batch", "splits"])
def _share_spares_kernel(
    plan_ptr,
    positions_ptr,
    batch,
    splits,
    BALANCE: tl.constexpr,
    COUNT: tl.constexpr,
    COUNT_PAD: tl.constexpr,
    BATCH_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.arange(0, BATCH_PAD)
    mask = n < batch
    wait_for_previous(PDL)
    length = tl.load(positions_ptr + n, mask=mask, other=0).to(tl.int32) + 1
    balance = BALANCE + tl.zeros([], tl.int32)
    more = tl.maximum(tl.cdiv(length, balance) - splits, 0)
    total = tl.sum(more, axis=0)
    while total > COUNT:
        balance = balance * 2
        more = tl.maximum(tl.cdiv(length, balance) - splits, 0)
        total = tl.sum(more, axis=0)
    first = tl.cumsum(more, axis=0) - more
    tl.store(plan_ptr + n, first, mask=mask)
    tl.store(plan_ptr + batch + n, more, mask=mask)
    served_ptr = plan_ptr + 2 * batch
    spare = tl.arange(0, COUNT_PAD)
    tl.store(served_ptr + spare, -1, mask=(spare >= total) & (spare < COUNT))
    for number in range(0, tl.max(more, axis=0)):
        tl.store(served_ptr + first + number, n, mask=mask & (number < more))


def assign_extra_splits(positions: Tensor, splits: int, count: int, pdl: bool = False) -> ExtraSplits | None:
    """Give the spare programs of a step to its longest rows.

    A row gets one for each `BALANCE` positions beyond those of its `splits` own programs. positions: [B] integers on
    the device, contiguous; count: from `choose_spares`; with 0 there are none. pdl: see the head of `kernels.norm`.
    """
    if not count:
        return None
    batch = len(positions)
    plan = torch.empty(2 * batch + count, dtype=torch.int32, device=positions.device)
    _share_spares_kernel[(1,)](
        plan,
        positions,
        batch,
        splits,
        BALANCE=BALANCE,
        COUNT=count,
        COUNT_PAD=triton.next_power_of_2(count),
        BATCH_PAD=triton.next_power_of_2(batch),
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return ExtraSplits(plan, count)
