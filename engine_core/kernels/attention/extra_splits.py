"""Extra splits of decode attention, for rows much longer than others.

If the batch alone fills the GPU, each row has few splits, and one long row would delay the step. Giving every row as
many splits as the longest possible row needs would leave nearly all of them idle: at 131,072 positions seven of eight.
So a launch has a fixed number of extra splits, which a kernel assigns to long rows once per step.
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
"""Positions per extra split of a row. If there are too few extra splits, it is doubled until they suffice."""


@dataclass(frozen=True, slots=True)
class ExtraSplits:
    """The extra splits of a step, as assigned by `assign_extra_splits`.

    A captured graph keeps reading its tensor.
    """

    plan: Tensor
    """[2 * B + count] int32 on the device: the first extra split of each row, the number of extra splits of each row,
    then the row of each extra split, or -1."""
    count: int
    """Number of extra splits of a KV head, a multiple of the splits."""


def choose_extra_splits(batch: int, kv_heads: int, multiprocessors: int, longest: int, splits: int) -> int:
    """Return the number of extra splits of a KV head, a multiple of `splits`.

    Over all heads they fill the GPU about once: if more rows are long, those rows fill it themselves. longest: maximum
    context length, in positions; splits: per row.
    """
    if not batch or ceil_div(longest, BALANCE) <= splits:
        return 0
    return splits * ceil_div(ceil_div(multiprocessors, kv_heads), splits)


def max_len_without_extra_splits(splits: int) -> int:
    """Return the maximum length of a row that gets no extra splits.

    splits: per row.
    """
    return splits * BALANCE


@triton.jit(do_not_specialize=["batch", "splits"])
def _assign_extra_splits_kernel(
    plan_ptr,
    positions_ptr,
    batch,
    splits,
    queries,
    BALANCE: tl.constexpr,
    COUNT: tl.constexpr,
    COUNT_PAD: tl.constexpr,
    BATCH_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.arange(0, BATCH_PAD)
    mask = n < batch
    wait_for_previous(PDL)
    length = tl.load(positions_ptr + n * queries + queries - 1, mask=mask, other=0).to(tl.int32) + 1
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
    extra = tl.arange(0, COUNT_PAD)
    tl.store(served_ptr + extra, -1, mask=(extra >= total) & (extra < COUNT))
    for number in range(0, tl.max(more, axis=0)):
        tl.store(served_ptr + first + number, n, mask=mask & (number < more))


def assign_extra_splits(
    positions: Tensor, splits: int, count: int, pdl: bool = False, queries: int = 1
) -> ExtraSplits | None:
    """Assign the extra splits of a step to its longest rows.

    A row gets one for each `BALANCE` positions beyond those of its `splits` own ones. positions: [B * queries] integers
    on the device, contiguous, of the tokens of B rows; count: from `choose_extra_splits`, returns None for 0; pdl: see
    `kernels.dependent_launch`; queries: adjacent tokens of each row.
    """
    if not count:
        return None
    batch = len(positions) // queries
    plan = torch.empty(2 * batch + count, dtype=torch.int32, device=positions.device)
    _assign_extra_splits_kernel[(1,)](
        plan,
        positions,
        batch,
        splits,
        queries,
        BALANCE=BALANCE,
        COUNT=count,
        COUNT_PAD=triton.next_power_of_2(count),
        BATCH_PAD=triton.next_power_of_2(batch),
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return ExtraSplits(plan, count)
