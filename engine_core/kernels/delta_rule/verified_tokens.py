"""The gated delta rule for rows with a token and drafts.

A program computes some value channels of one head for all tokens of a row: it reads the base and the ring once. The
first token is known. As for single tokens, the program folds the ring into the base before it, at multiples of the
ring's size. Later folds wait until drafts are accepted (`accepted.py`): the updates of all tokens are added to the
ring. Oracle: `reference.delta_rule.delta_rule`. `pdl`: see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.delta_rule.ring import fold_ring, ring_pointers
from tandem.engine_core.kernels.delta_rule.single_tokens import (
    SMALL_BATCH,
    SMALL_VALUE_BLOCK,
    SMALL_WARPS,
    VALUE_BLOCK,
    WARPS,
    add_two,
    log_decay,
)
from tandem.engine_core.kernels.delta_rule.state import DeltaRuleShape, DeltaRuleState, TokenRows
from tandem.engine_core.kernels.dependent_launch import wait_for_previous

MAX_QUERIES = 8
"""Maximum number of tokens of a row."""


@triton.jit(do_not_specialize=["queries"])
def _verified_tokens_kernel(
    out_ptr,
    qkv_ptr,
    gates_ptr,
    a_log_ptr,
    dt_bias_ptr,
    base_ptr,
    updates_ptr,
    keys_ptr,
    decays_ptr,
    rows_ptr,
    positions_ptr,
    qkv_stride,
    gates_stride,
    queries,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    U: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    first, head, part = tl.program_id(0).to(tl.int64) * queries, tl.program_id(1), tl.program_id(2)
    key_head = head // (HEADS // KEY_HEADS)
    k_index, v_index, r_index = tl.arange(0, K), part * BLOCK + tl.arange(0, BLOCK), tl.arange(0, R)
    number = tl.arange(0, PAD)
    row = tl.load(rows_ptr + first).to(tl.int64)
    position = tl.load(positions_ptr + first).to(tl.int32)
    is_live = (number < queries) & (tl.load(rows_ptr + first + number, mask=number < queries, other=0) > 0)
    count = tl.sum(is_live.to(tl.int32))
    has_state = (row > 0) & (position > 0)
    cursor = position % R
    own_base_ptr = base_ptr + (row * HEADS + head) * K * V + k_index[:, None] * V + v_index[None, :]
    ring = ring_pointers(updates_ptr, keys_ptr, decays_ptr, row, head, KEY_HEADS, HEADS, K, V, R, U)
    own_updates_ptr, own_keys_ptr, own_decays_ptr = ring
    # The preceding kernel, the convolution, writes only qkv.
    base = tl.load(own_base_ptr, mask=has_state & (k_index[:, None] >= 0), other=0.0)
    in_ring = (row > 0) & (r_index < cursor)
    at = position - cursor + r_index
    old_keys_ptr = own_keys_ptr + (at % (2 * R))[:, None] * K + k_index[None, :]
    old_updates_ptr = own_updates_ptr + (at % U)[:, None] * V + v_index[None, :]
    old_keys = tl.load(old_keys_ptr, mask=in_ring[:, None], other=0.0)
    old_updates = tl.load(old_updates_ptr, mask=in_ring[:, None], other=0.0)
    old_decays = tl.load(own_decays_ptr + at % (2 * R), mask=in_ring, other=0.0)
    total = tl.load(own_decays_ptr + (position + 2 * R - 1) % (2 * R), mask=has_state, other=0.0)
    if (row > 0) & (cursor == 0):
        base = fold_ring(base, *ring, position, k_index, v_index, K, V, R, U, K_AXIS=0)
        # The layouts of load and store may differ.
        tl.debug_barrier()
        tl.store(own_base_ptr, base)
        total = 0.0
    wait_for_previous(PDL)
    if row > 0:
        own_key_ptr = qkv_ptr + first * qkv_stride + (KEY_HEADS + key_head) * K + k_index
        own_value_ptr = qkv_ptr + first * qkv_stride + 2 * KEY_HEADS * K + head * V + v_index
        stored_keys = tl.load(own_key_ptr[None, :] + number[:, None] * qkv_stride, mask=is_live[:, None], other=0.0)
        new_keys, wide_keys = stored_keys.to(tl.float32), old_keys.to(tl.float32)
        updates, results = tl.zeros((PAD, BLOCK), tl.float32), tl.zeros((PAD, BLOCK), tl.float32)
        totals = tl.zeros((PAD,), tl.float32)
        for token in range(count):
            key = tl.load(own_key_ptr + token * qkv_stride).to(tl.float32)
            query = tl.load(own_key_ptr + token * qkv_stride - KEY_HEADS * K).to(tl.float32)
            value = tl.load(own_value_ptr + token * qkv_stride).to(tl.float32)
            gate = gates_ptr + (first + token) * gates_stride
            beta = tl.sigmoid(tl.load(gate + head).to(tl.float32))
            total += log_decay(gate, a_log_ptr, dt_bias_ptr, head, True, HEADS)
            scale, is_before = tl.exp(total), number < token
            old_weights = tl.where(in_ring, tl.exp(total - old_decays), 0.0)
            new_weights = tl.where(is_before, tl.exp(total - totals), 0.0)
            shares = tl.reduce((wide_keys * key[None, :], wide_keys * query[None, :]), 1, add_two)
            of_base = tl.reduce((base * key[:, None], base * query[:, None]), 0, add_two)
            wide = old_updates * (old_weights * shares[0])[:, None], old_updates * (old_weights * shares[1])[:, None]
            of_ring = tl.reduce(wide, 0, add_two)
            shares = tl.reduce((new_keys * key[None, :], new_keys * query[None, :]), 1, add_two)
            # Of later tokens there are zeros, but their keys may hold NaN.
            key_weights = new_weights * tl.where(is_before, shares[0], 0.0)
            query_weights = new_weights * tl.where(is_before, shares[1], 0.0)
            of_new = tl.reduce((updates * key_weights[:, None], updates * query_weights[:, None]), 0, add_two)
            remembered = scale * of_base[0] + of_ring[0] + of_new[0]
            result = scale * of_base[1] + of_ring[1] + of_new[1]
            update = beta * (value - remembered)
            result += tl.sum(key * query) * update
            is_own = number == token
            updates = tl.where(is_own[:, None], update[None, :], updates)
            results = tl.where(is_own[:, None], result[None, :], results)
            totals = tl.where(is_own, total, totals)
        # Reads of the ring by this program come before these writes; others write other entries.
        tl.debug_barrier()
        written = position + number
        target_ptr = own_updates_ptr + (written % U)[:, None] * V + v_index[None, :]
        tl.store(target_ptr, updates, mask=is_live[:, None])
        if part == 0:
            tl.store(own_decays_ptr + written % (2 * R), totals, mask=is_live)
            if head % (HEADS // KEY_HEADS) == 0:
                key_target_ptr = own_keys_ptr + (written % (2 * R))[:, None] * K + k_index[None, :]
                tl.store(key_target_ptr, stored_keys, mask=is_live[:, None])
        own_out_ptr = out_ptr + ((first + number)[:, None] * HEADS + head) * V + v_index[None, :]
        tl.store(own_out_ptr, results.to(out_ptr.dtype.element_ty), mask=is_live[:, None])


def verified_tokens(
    out: Tensor,
    qkv: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    shape: DeltaRuleShape,
    state: DeltaRuleState,
    tokens: TokenRows,
    pdl: bool = False,
) -> None:
    """Run the delta rule over the tokens of a step that verifies drafts; see the oracle.

    Arguments are those of `single_tokens`. Raises ValueError for more tokens of a row than MAX_QUERIES, or than the
    memory has room for.
    """
    shape.check_heads()
    queries, room = tokens.queries, state.num_updates - state.ring
    if not queries <= min(MAX_QUERIES, 1 + room):
        raise ValueError(f"{queries} tokens a row; at most {MAX_QUERIES} are supported, and the ring has {room} more")
    rows = len(tokens.rows) // queries
    block, warps = (SMALL_VALUE_BLOCK, SMALL_WARPS) if rows <= SMALL_BATCH else (VALUE_BLOCK, WARPS)
    block = min(block, shape.value_dim)
    _verified_tokens_kernel[(rows, shape.value_heads, shape.value_dim // block)](
        *(out, qkv, gates, a_log, dt_bias, state.base, state.updates, state.keys, state.decays),
        *(tokens.rows, tokens.positions, qkv.stride(0), gates.stride(0), queries),
        KEY_HEADS=shape.key_heads,
        HEADS=shape.value_heads,
        K=shape.key_dim,
        V=shape.value_dim,
        R=state.ring,
        U=state.num_updates,
        PAD=MAX_QUERIES,
        BLOCK=block,
        PDL=pdl,
        num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )
