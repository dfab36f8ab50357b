"""The bases of rows with accepted drafts, for all layers in one launch.

A program folds the ring of some heads of a row, if the row has passed a multiple of the ring's size since the step
began. Most programs return at once: a row does so every R tokens. Oracle: `reference.delta_rule.fold_accepted`. `pdl`:
see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.delta_rule.ring import fold_ring, ring_pointers
from tandem.engine_core.kernels.delta_rule.state import DeltaRuleState
from tandem.engine_core.kernels.delta_rule.verified_tokens import MAX_QUERIES
from tandem.engine_core.kernels.dependent_launch import wait_for_previous

HEADS_AT_ONCE = 4
"""Heads of a program: fewer programs return at once, and one row still has enough of them to read it."""
VALUE_BLOCK = 64
"""Value channels that a program folds at once."""


@triton.jit
def _fold_accepted_kernel(
    base_ptr,
    updates_ptr,
    keys_ptr,
    decays_ptr,
    rows_ptr,
    lengths_ptr,
    counts_ptr,
    num_rows,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    U: tl.constexpr,
    PAD: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    index, layer, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    k_index, number = tl.arange(0, K), tl.arange(0, PAD)
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + index)
    count = tl.load(counts_ptr + index) & 0xFF
    computed = tl.load(lengths_ptr + row) - 1
    after = (computed - 1) // R * R
    if (row > 0) & (count > 0) & (after > computed - count):
        own = layer.to(tl.int64) * num_rows + row
        for head in range(group * HEADS_AT_ONCE, tl.minimum((group + 1) * HEADS_AT_ONCE, HEADS)):
            ring = ring_pointers(updates_ptr, keys_ptr, decays_ptr, own, head, KEY_HEADS, HEADS, K, V, R, U)
            own_decays_ptr = ring[2]
            total = tl.load(own_decays_ptr + (after - 1) % (2 * R))
            for part in range(V // BLOCK):
                v_index = part * BLOCK + tl.arange(0, BLOCK)
                own_base_ptr = base_ptr + (own * HEADS + head) * K * V + k_index[:, None] * V + v_index[None, :]
                base = tl.load(own_base_ptr)
                base = fold_ring(base, *ring, after, k_index, v_index, K, V, R, U, K_AXIS=0)
                # The layouts of load and store may differ.
                tl.debug_barrier()
                tl.store(own_base_ptr, base)
            is_newer = after + number < computed
            newer_ptr = own_decays_ptr + (after + number) % (2 * R)
            newer = tl.load(newer_ptr, mask=is_newer, other=0.0)
            tl.debug_barrier()
            tl.store(newer_ptr, newer - total, mask=is_newer)


def fold_accepted(states: DeltaRuleState, rows: Tensor, lengths: Tensor, counts: Tensor, pdl: bool = False) -> None:
    """Write the base of rows whose accepted tokens have passed a multiple of the ring's size; see the oracle."""
    layers, num_rows, heads, key_dim, value_dim = states.base.shape
    if not len(rows):
        return
    _fold_accepted_kernel[(len(rows), layers, triton.cdiv(heads, HEADS_AT_ONCE))](
        *(states.base, states.updates, states.keys, states.decays, rows, lengths, counts, num_rows),
        KEY_HEADS=states.keys.shape[2],
        HEADS=heads,
        K=key_dim,
        V=value_dim,
        R=states.ring,
        U=states.num_updates,
        PAD=MAX_QUERIES,
        HEADS_AT_ONCE=HEADS_AT_ONCE,
        BLOCK=min(VALUE_BLOCK, value_dim),
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
