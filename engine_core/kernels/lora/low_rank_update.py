"""Low-rank updates that a GEMV adds to its own sums: LoRA (Hu et al., 2021).

`linear.shrink_rows` multiplies the inputs by A. The GEMV multiplies the result by B, and adds it before the bias and
the activation: a projection takes one launch more than without adapters.

The launch of A waits for the kernel that writes the inputs before it lets the GEMV start. So the GEMV reads the inputs
at once, and waits for A only when it adds the update (see `kernels.dependent_launch`).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# ruff: noqa: N803, N806, RUF005

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.lora.lora_updates import LoraUpdates
from tandem.engine_core.kernels.lora.shrink_expand import BLOCK_R, MAX_PARTS

_RANKS = tl.constexpr(BLOCK_R)


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """The update of a GEMV of T tokens."""

    lora: LoraUpdates
    sums: Tensor
    """[N, T, P * R] float32: the inputs times A, in N terms to be added."""

    @property
    def row_tensors(self) -> tuple[Tensor, ...]:
        """Tensors of a kernel with `row_updates`."""
        return self.sums, self.lora.b, self.lora.ranks, self.lora.tokens.slots


def update_constants(update: LowRankUpdate | None) -> dict[str, int]:
    """Return the constants of a kernel that adds an update, or none: PARTS is 0 then."""
    if update is None:
        return dict.fromkeys(("START1", "START2", "START3", "PARTS", "MAX_RANK", "TERMS"), 0)
    starts = update.lora.starts
    first, second, third, *_ = *starts[1:], *(starts[-1:] * MAX_PARTS)
    return {
        "START1": first,
        "START2": second,
        "START3": third,
        "PARTS": len(starts) - 1,
        "MAX_RANK": update.lora.b.shape[1],
        "TERMS": update.sums.shape[0],
    }


@triton.jit
def wait_for_inputs(PARTS: tl.constexpr, PDL: tl.constexpr):
    """Wait for the inputs of a GEMV, unless it adds updates (PARTS above 0): the launch of A has waited for them."""
    if PARTS == 0:
        wait_for_previous(PDL)
    elif PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_update(PARTS: tl.constexpr, PDL: tl.constexpr):
    """Wait for the inputs times A, in a GEMV that adds updates."""
    if PARTS > 0 and PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _part_of(column, starts):
    """Return the parts of columns. starts: first outputs of the three parts behind the first, and more."""
    return (column >= starts[0]).to(tl.int32) + (column >= starts[1]).to(tl.int32) + (column >= starts[2]).to(tl.int32)


@triton.jit
def _row_b(b_ptr, slot, first, columns, rank, outputs, MAX_RANK: tl.constexpr):
    """Load B of a slot from rank `first` on, [ROWS, BLOCK_R], with zeros from `rank`, [ROWS], on."""
    ranks = first + tl.arange(0, _RANKS)
    rows = ((slot - 1) * MAX_RANK + ranks).to(tl.int64)
    inside = ranks[None, :] < rank[:, None]
    return tl.load(b_ptr + rows[None, :] * outputs + columns[:, None], mask=inside, other=0.0)


@triton.jit
def first_row_b(tensors, sizes, columns, mask, M, outputs, TOKENS: tl.constexpr):
    """Load B of the first ranks for `row_updates`, which may happen long before: no kernel of a step writes it."""
    _, b_ptr, ranks_ptr, slots_ptr = tensors
    PARTS: tl.constexpr = sizes[3]
    found = ()
    if PARTS > 0:
        part = _part_of(columns, sizes)
        for token in tl.static_range(TOKENS):
            slot = tl.load(slots_ptr + tl.minimum(token, M - 1))
            rank = tl.load(ranks_ptr + slot * PARTS + part, mask=mask, other=0)
            found = found + (_row_b(b_ptr, slot, 0, columns, rank, outputs, sizes[4]),)
    return found


@triton.jit
def row_updates(tensors, sizes, first_b, columns, mask, M, outputs, TOKENS: tl.constexpr):
    """Return the updates of some columns of each token, [ROWS] float32; empty if PARTS is 0.

    tensors: sums, [TERMS, M, PARTS * MAX_RANK] float32, b, [S, MAX_RANK, outputs], ranks, [S + 1, PARTS], and slots,
    [M]; sizes: START1 to START3 (see `_part_of`), PARTS, MAX_RANK and TERMS; first_b: from `first_row_b`; columns,
    mask: [ROWS]. Tokens past M repeat the last one.
    """
    sums_ptr, b_ptr, ranks_ptr, slots_ptr = tensors
    PARTS: tl.constexpr = sizes[3]
    MAX_RANK: tl.constexpr = sizes[4]
    TERMS: tl.constexpr = sizes[5]
    found = ()
    if PARTS > 0:
        dtype: tl.constexpr = b_ptr.dtype.element_ty
        part = _part_of(columns, sizes)
        for index in tl.static_range(TOKENS):
            token = tl.minimum(index, M - 1)
            slot = tl.load(slots_ptr + token)
            rank = tl.load(ranks_ptr + slot * PARTS + part, mask=mask, other=0)
            b = first_b[index]
            update = tl.zeros(columns.shape, tl.float32)
            for first in range(0, tl.max(rank, 0), _RANKS):
                if first > 0:
                    b = _row_b(b_ptr, slot, first, columns, rank, outputs, MAX_RANK)
                ranks = first + tl.arange(0, _RANKS)
                inside = ranks[None, :] < rank[:, None]
                shrunk = tl.zeros(inside.shape, tl.float32)
                for term in tl.static_range(TERMS):
                    row_ptr = sums_ptr + (term * M + token) * (PARTS * MAX_RANK)
                    offs = (part * MAX_RANK)[:, None] + ranks[None, :]
                    shrunk += tl.load(row_ptr + offs, mask=inside, other=0.0)
                update += tl.sum(shrunk.to(dtype).to(tl.float32) * b.to(tl.float32), 1)
            found = found + (update,)
    return found
