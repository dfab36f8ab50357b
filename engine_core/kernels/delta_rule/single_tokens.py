"""The gated delta rule for rows with one token each.

A program computes some value channels of one head: it reads the base and the ring, and writes the token's update. If
the token's position is a multiple of the ring's size, it first folds the ring into the base. Oracle:
`reference.delta_rule.delta_rule`. `pdl`: see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.delta_rule.ring import fold_ring, ring_pointers
from tandem.engine_core.kernels.delta_rule.state import DeltaRuleShape, DeltaRuleState, TokenRows
from tandem.engine_core.kernels.dependent_launch import wait_for_previous

VALUE_BLOCK, WARPS = 64, 4
"""Value channels and warps of a program."""
SMALL_BATCH, SMALL_VALUE_BLOCK, SMALL_WARPS = 4, 32, 4
"""With few rows, more programs of fewer channels keep more of a GPU busy."""


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) of float32 values."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def log_decay(gates_ptr, a_log_ptr, dt_bias_ptr, head, mask, HEADS: tl.constexpr):
    """Return g of tokens. gates_ptr: of each token's b of head 0, followed by all a."""
    a = tl.load(gates_ptr + HEADS + head, mask=mask, other=0.0).to(tl.float32)
    return -tl.exp(tl.load(a_log_ptr + head)) * softplus(a + tl.load(dt_bias_ptr + head))


@triton.jit
def add_two(a, b, c, d):
    """Add pairs, for `tl.reduce`: two sums share their barriers, and need fewer registers than one after the other."""
    return a + c, b + d


@triton.jit
def _single_tokens_kernel(
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
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    U: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    key_head = head // (HEADS // KEY_HEADS)
    k_index, v_index, r_index = tl.arange(0, K), part * BLOCK + tl.arange(0, BLOCK), tl.arange(0, R)
    row = tl.load(rows_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int32)
    has_state = (row > 0) & (position > 0)
    cursor = position % R
    own_base_ptr = base_ptr + (row * HEADS + head) * K * V + k_index[:, None] * V + v_index[None, :]
    ring = ring_pointers(updates_ptr, keys_ptr, decays_ptr, row, head, KEY_HEADS, HEADS, K, V, R, U)
    own_updates_ptr, own_keys_ptr, own_decays_ptr = ring
    # The preceding kernel, the convolution, writes only qkv.
    base = tl.load(own_base_ptr, mask=has_state & (k_index[:, None] >= 0), other=0.0)
    in_ring = (row > 0) & (r_index < cursor)
    at = (position - cursor + r_index) % (2 * R)
    old_keys = tl.load(own_keys_ptr + at[:, None] * K + k_index[None, :], mask=in_ring[:, None], other=0.0)
    own_index = (position - cursor + r_index) % U
    updates = tl.load(own_updates_ptr + own_index[:, None] * V + v_index[None, :], mask=in_ring[:, None], other=0.0)
    old_decays = tl.load(own_decays_ptr + at, mask=in_ring, other=0.0)
    total = tl.load(own_decays_ptr + (position + 2 * R - 1) % (2 * R), mask=has_state, other=0.0)
    gate = gates_ptr + token * gates_stride
    beta = tl.sigmoid(tl.load(gate + head).to(tl.float32))
    decay = log_decay(gate, a_log_ptr, dt_bias_ptr, head, True, HEADS)
    if (row > 0) & (cursor == 0):
        base = fold_ring(base, *ring, position, k_index, v_index, K, V, R, U, K_AXIS=0)
        # The layouts of load and store may differ.
        tl.debug_barrier()
        tl.store(own_base_ptr, base)
        total = 0.0
    total += decay
    wait_for_previous(PDL)
    if row > 0:
        source = qkv_ptr + token * qkv_stride
        query = tl.load(source + key_head * K + k_index).to(tl.float32)
        stored_key = tl.load(source + (KEY_HEADS + key_head) * K + k_index)
        value = tl.load(source + 2 * KEY_HEADS * K + head * V + v_index).to(tl.float32)
        key = stored_key.to(tl.float32)
        scale, weights = tl.exp(total), tl.where(in_ring, tl.exp(total - old_decays), 0.0)
        wide_keys = old_keys.to(tl.float32)
        shares = tl.reduce((wide_keys * key[None, :], wide_keys * query[None, :]), 1, add_two)
        of_base = tl.reduce((base * key[:, None], base * query[:, None]), 0, add_two)
        wide = updates * (weights * shares[0])[:, None], updates * (weights * shares[1])[:, None]
        of_ring = tl.reduce(wide, 0, add_two)
        remembered, result = scale * of_base[0] + of_ring[0], scale * of_base[1] + of_ring[1]
        update = beta * (value - remembered)
        result += tl.sum(key * query) * update
        # Reads of the ring by this program come before these writes; others write other entries.
        tl.debug_barrier()
        tl.store(own_updates_ptr + (position % U) * V + v_index, update)
        if part == 0:
            tl.store(own_decays_ptr + position % (2 * R), total)
            if head % (HEADS // KEY_HEADS) == 0:
                tl.store(own_keys_ptr + (position % (2 * R)) * K + k_index, stored_key)
        tl.store(out_ptr + (token * HEADS + head) * V + v_index, result.to(out_ptr.dtype.element_ty))


def single_tokens(
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
    """Run the delta rule over the first `num_single` tokens; see the oracle.

    out: [T, value_heads, value_dim], written but for padding; qkv: contiguous, and all that the preceding kernel may
    write with `pdl`; gates: rows contiguous. Raises ValueError for heads of other sizes than powers of two from 16 on.
    """
    shape.check_heads()
    block, warps = (SMALL_VALUE_BLOCK, SMALL_WARPS) if tokens.num_single <= SMALL_BATCH else (VALUE_BLOCK, WARPS)
    block = min(block, shape.value_dim)
    _single_tokens_kernel[(tokens.num_single, shape.value_heads, shape.value_dim // block)](
        *(out, qkv, gates, a_log, dt_bias, state.base, state.updates, state.keys, state.decays),
        *(tokens.rows, tokens.positions, qkv.stride(0), gates.stride(0)),
        KEY_HEADS=shape.key_heads,
        HEADS=shape.value_heads,
        K=shape.key_dim,
        V=shape.value_dim,
        R=state.ring,
        U=state.num_updates,
        BLOCK=block,
        PDL=pdl,
        num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )
