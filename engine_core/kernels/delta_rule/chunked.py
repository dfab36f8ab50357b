"""The gated delta rule for rows with several tokens, in the chunked form of Yang et al. (2024, 2025).

A first launch computes two matrices of each piece and head, independently of the state. With A the strictly lower
triangle of beta_i exp(G_i - G_j) k_i . k_j, the updates of a piece are u = T (v - exp(G) K S) with
T = (I + A)^-1 diag(beta), and its outputs o = exp(G) Q S + P u, where P is the lower triangle of
exp(G_i - G_j) q_i . k_j. A second launch goes through the pieces of each row in order and carries S in registers; it
leaves the base as it is at the ring's last boundary, and the updates after it. A third one writes keys and decays of
the ring, which programs of the second read.

Oracle: `reference.delta_rule.delta_rule`. `pdl`: see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.delta_rule.ring import fold_ring, ring_pointers, tokens_in_ring
from tandem.engine_core.kernels.delta_rule.single_tokens import log_decay
from tandem.engine_core.kernels.delta_rule.state import PIECE, DeltaRuleShape, DeltaRuleState, Pieces, TokenRows
from tandem.engine_core.kernels.dependent_launch import wait_for_previous

VALUE_BLOCK, STATE_WARPS, STATE_STAGES = 32, 8, 2
"""Value channels of a program of the second launch, its warps, and the pieces that are loaded ahead, plus one."""
MATRIX_WARPS = 2
"""Warps of a program of the first launch."""
# Results of matmuls have at most 32 rows, so that no number of warps makes Triton use wgmma on Hopper: 3.6 and 3.7 can
# generate invalid reads of shared memory in kernels with several (triton-lang/triton#11366).
HALF = tl.constexpr(PIECE // 2)


@triton.jit
def _inverse(system, PRECISION: tl.constexpr):
    """Return (I + system)^-1 of a strictly lower triangular [32, 32] matrix.

    Blocks of 1 are joined into blocks of 4, then of 16, then of 64. Powers of the whole matrix would grow beyond what
    float32 cancels. To join the diagonal blocks D by the blocks L below, N = D L is nilpotent, N^4 = 0, and the inverse
    is (I - N)(I + N^2) D.
    """
    line, column = tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :]
    inverse = tl.where(line == column, 1.0, 0.0)
    # The loop is not unrolled, which keeps the code small.
    for level in range(3):
        inner, outer = 1 << (2 * level), 4 << (2 * level)
        joined = (line // outer == column // outer) & (line // inner != column // inner)
        n = tl.dot(inverse, tl.where(joined, system, 0.0), input_precision=PRECISION)
        square = tl.dot(n, n, input_precision=PRECISION)
        inverse -= tl.dot(n, inverse, input_precision=PRECISION)
        inverse += tl.dot(square, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _piece_matrices_kernel(
    solved_ptr,
    scores_ptr,
    sums_ptr,
    qkv_ptr,
    gates_ptr,
    a_log_ptr,
    dt_bias_ptr,
    counts_ptr,
    pieces_ptr,
    qkv_stride,
    gates_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    piece, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    wait_for_previous(PDL)
    if piece < tl.load(counts_ptr):
        first, end = tl.load(pieces_ptr + 2 * piece), tl.load(pieces_ptr + 2 * piece + 1)
        matrix = (piece * HEADS + head).to(tl.int64)
        index, k_index = tl.arange(0, HALF), tl.arange(0, K)
        line, column = index[:, None], index[None, :]
        token = (first + index).to(tl.int64)
        low, high = token < end, token + HALF < end
        gate = gates_ptr + token * gates_stride
        low_decay = tl.where(low, log_decay(gate, a_log_ptr, dt_bias_ptr, head, low, HEADS), 0.0)
        gate_high = gate + HALF * gates_stride
        high_decay = tl.where(high, log_decay(gate_high, a_log_ptr, dt_bias_ptr, head, high, HEADS), 0.0)
        low_sums = tl.cumsum(low_decay, 0)
        high_sums = tl.cumsum(high_decay, 0) + tl.sum(low_decay)
        tl.store(sums_ptr + matrix * PIECE + index, low_sums)
        tl.store(sums_ptr + matrix * PIECE + HALF + index, high_sums)
        low_beta = tl.sigmoid(tl.load(gate + head, mask=low, other=0.0).to(tl.float32))
        high_beta = tl.sigmoid(tl.load(gate_high + head, mask=high, other=0.0).to(tl.float32))
        low_beta, high_beta = tl.where(low, low_beta, 0.0), tl.where(high, high_beta, 0.0)
        # The blocks of the lower triangle of [64, 64] matrices; the other is zero in both results.
        target = matrix * (PIECE * PIECE) + line * PIECE + column
        low_target, cross_target, high_target = target, target + HALF * PIECE, target + HALF * PIECE + HALF
        zeros = tl.zeros((HALF, HALF), solved_ptr.dtype.element_ty)
        tl.store(solved_ptr + target + HALF, zeros)
        tl.store(scores_ptr + target + HALF, zeros)
        source = qkv_ptr + token[:, None] * qkv_stride + key_head * K + k_index[None, :]
        high_source = source + HALF * qkv_stride
        key = tl.load(source + KEY_HEADS * K, mask=low[:, None], other=0.0)
        high_key = tl.load(high_source + KEY_HEADS * K, mask=high[:, None], other=0.0)
        query = tl.load(source, mask=low[:, None], other=0.0)
        high_query = tl.load(high_source, mask=high[:, None], other=0.0)
        ratio = tl.exp(tl.minimum(low_sums[:, None] - low_sums[None, :], 0.0))
        scores = ratio * tl.dot(query, tl.trans(key), input_precision=PRECISION)
        tl.store(scores_ptr + low_target, tl.where(line >= column, scores, 0.0).to(scores_ptr.dtype.element_ty))
        system = ratio * tl.dot(key, tl.trans(key), input_precision=PRECISION)
        low_system = tl.where(line > column, low_beta[:, None] * system, 0.0)
        ratio = tl.exp(tl.minimum(high_sums[:, None] - low_sums[None, :], 0.0))
        scores = ratio * tl.dot(high_query, tl.trans(key), input_precision=PRECISION)
        tl.store(scores_ptr + cross_target, scores.to(scores_ptr.dtype.element_ty))
        cross = high_beta[:, None] * ratio * tl.dot(high_key, tl.trans(key), input_precision=PRECISION)
        ratio = tl.exp(tl.minimum(high_sums[:, None] - high_sums[None, :], 0.0))
        scores = ratio * tl.dot(high_query, tl.trans(high_key), input_precision=PRECISION)
        tl.store(scores_ptr + high_target, tl.where(line >= column, scores, 0.0).to(scores_ptr.dtype.element_ty))
        system = ratio * tl.dot(high_key, tl.trans(high_key), input_precision=PRECISION)
        high_system = tl.where(line > column, high_beta[:, None] * system, 0.0)
        low_inverse = _inverse(low_system, PRECISION)
        tl.store(solved_ptr + low_target, (low_inverse * low_beta[None, :]).to(solved_ptr.dtype.element_ty))
        high_inverse = _inverse(high_system, PRECISION)
        tl.store(solved_ptr + high_target, (high_inverse * high_beta[None, :]).to(solved_ptr.dtype.element_ty))
        solved = tl.dot(high_inverse, cross, input_precision=PRECISION)
        solved = -tl.dot(solved, low_inverse, input_precision=PRECISION) * low_beta[None, :]
        tl.store(solved_ptr + cross_target, solved.to(solved_ptr.dtype.element_ty))


@triton.jit
def _run_piece(
    state,
    piece,
    begin,
    stop,
    out_ptr,
    qkv_ptr,
    solved_ptr,
    scores_ptr,
    sums_ptr,
    head,
    v_index,
    qkv_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Store the outputs of a piece's tokens; return their updates, keys and sums of decays.

    state: before the piece, [BLOCK, K]; v_index: its value channels. Returns [BLOCK, PIECE], [PIECE, K] and [PIECE].
    """
    index, k_index = tl.arange(0, PIECE), tl.arange(0, K)
    token = (begin + index).to(tl.int64)
    inside = token < stop
    source = qkv_ptr + token[:, None] * qkv_stride + (head // (HEADS // KEY_HEADS)) * K + k_index[None, :]
    query = tl.load(source, mask=inside[:, None], other=0.0)
    key = tl.load(source + KEY_HEADS * K, mask=inside[:, None], other=0.0)
    value_ptr = qkv_ptr + token[None, :] * qkv_stride + 2 * KEY_HEADS * K + head * V + v_index[:, None]
    value = tl.load(value_ptr, mask=inside[None, :], other=0.0)
    number = (piece * HEADS + head).to(tl.int64)
    matrix = number * (PIECE * PIECE) + index[:, None] * PIECE + index[None, :]
    solved, scores = tl.load(solved_ptr + matrix), tl.load(scores_ptr + matrix)
    sums = tl.load(sums_ptr + number * PIECE + index)
    rounded, scale = state.to(key.dtype), tl.exp(sums)[None, :]
    remembered = tl.dot(rounded, tl.trans(key), input_precision=PRECISION)
    target = (value.to(tl.float32) - scale * remembered).to(solved.dtype)
    update = tl.dot(target, tl.trans(solved), input_precision=PRECISION)
    result = scale * tl.dot(rounded, tl.trans(query), input_precision=PRECISION)
    result += tl.dot(update.to(scores.dtype), tl.trans(scores), input_precision=PRECISION)
    target_ptr = out_ptr + (token[None, :] * HEADS + head) * V + v_index[:, None]
    tl.store(target_ptr, result.to(out_ptr.dtype.element_ty), mask=inside[None, :])
    return update, key, sums


@triton.jit
def _row_states_kernel(
    out_ptr,
    qkv_ptr,
    solved_ptr,
    scores_ptr,
    sums_ptr,
    base_ptr,
    updates_ptr,
    keys_ptr,
    decays_ptr,
    rows_ptr,
    positions_ptr,
    counts_ptr,
    pieces_ptr,
    spans_ptr,
    qkv_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    U: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Carry the state of some value channels of a head through the pieces of a row, transposed: [BLOCK, K]."""
    span, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    index, k_index, v_index = tl.arange(0, PIECE), tl.arange(0, K), part * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    if span < tl.load(counts_ptr + 1):
        first_piece, end_piece = tl.load(spans_ptr + 2 * span), tl.load(spans_ptr + 2 * span + 1)
        first = tl.load(pieces_ptr + 2 * first_piece)
        end = tl.load(pieces_ptr + 2 * end_piece - 1)
        row = tl.load(rows_ptr + first).to(tl.int64)
        start = tl.load(positions_ptr + first).to(tl.int32)
        own_base_ptr = base_ptr + (row * HEADS + head) * K * V + k_index[None, :] * V + v_index[:, None]
        ring = ring_pointers(updates_ptr, keys_ptr, decays_ptr, row, head, KEY_HEADS, HEADS, K, V, R, U)
        state = tl.load(own_base_ptr, mask=(start > 0) & (k_index[None, :] >= 0), other=0.0)
        state = fold_ring(state, *ring, start, k_index, v_index, K, V, R, U, K_AXIS=1)
        # Only the first and the last piece can be shorter than PIECE. The last one follows the loop, which needs the
        # state before it. (A variable of the loop that keeps the state before a piece would disable its pipelining.)
        grid = first - start % PIECE
        for piece in tl.range(first_piece, end_piece - 1, num_stages=STAGES):
            begin = tl.maximum(grid + (piece - first_piece) * PIECE, first)
            stop = grid + (piece - first_piece + 1) * PIECE
            update, key, sums = _run_piece(
                *(state, piece, begin, stop, out_ptr, qkv_ptr, solved_ptr, scores_ptr, sums_ptr, head, v_index),
                *(qkv_stride, KEY_HEADS, HEADS, K, V, PIECE, PRECISION),
            )
            last = tl.load(sums_ptr + (piece * HEADS + head).to(tl.int64) * PIECE + PIECE - 1)
            weighted = (update * tl.exp(last - sums)[None, :]).to(key.dtype)
            state = state * tl.exp(last) + tl.dot(weighted, key, input_precision=PRECISION)
        piece = end_piece - 1
        begin = tl.maximum(grid + (piece - first_piece) * PIECE, first)
        update, key, sums = _run_piece(
            *(state, piece, begin, end, out_ptr, qkv_ptr, solved_ptr, scores_ptr, sums_ptr, head, v_index),
            *(qkv_stride, KEY_HEADS, HEADS, K, V, PIECE, PRECISION),
        )
        # The ring's last boundary before the end: the base covers `kept` tokens of the last piece. If that is negative,
        # it ends before the piece.
        position = start + begin - first
        after = start + end - first
        kept = after - tokens_in_ring(after, R) - position
        if kept >= 0:
            sums_ptr += (piece * HEADS + head).to(tl.int64) * PIECE
            until = tl.load(sums_ptr + kept - 1, mask=kept > 0, other=0.0)
            weight = tl.where(index < kept, tl.exp(tl.minimum(until - sums, 0.0)), 0.0)
            added = tl.dot((update * weight[None, :]).to(key.dtype), key, input_precision=PRECISION)
            tl.store(own_base_ptr, state * tl.exp(until) + added)
        newest = (begin + index < end) & (index >= kept)
        update_ptr = ring[0] + ((position + index) % U)[None, :] * V + v_index[:, None]
        # All reads of the ring come before these writes.
        tl.debug_barrier()
        tl.store(update_ptr, update, mask=newest[None, :])


@triton.jit
def _keep_ring_kernel(
    keys_ptr,
    decays_ptr,
    qkv_ptr,
    sums_ptr,
    rows_ptr,
    positions_ptr,
    counts_ptr,
    pieces_ptr,
    spans_ptr,
    qkv_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    PIECE: tl.constexpr,
    PDL: tl.constexpr,
):
    span, head = tl.program_id(0), tl.program_id(1)
    wait_for_previous(PDL)
    if span < tl.load(counts_ptr + 1):
        first = tl.load(pieces_ptr + 2 * tl.load(spans_ptr + 2 * span))
        piece = tl.load(spans_ptr + 2 * span + 1) - 1
        begin, end = tl.load(pieces_ptr + 2 * piece), tl.load(pieces_ptr + 2 * piece + 1)
        row = tl.load(rows_ptr + first).to(tl.int64)
        start = tl.load(positions_ptr + first).to(tl.int32)
        position = start + begin - first
        after = start + end - first
        kept = after - tokens_in_ring(after, R) - position
        sums_ptr += (piece * HEADS + head).to(tl.int64) * PIECE
        own_decays_ptr = decays_ptr + (row * HEADS + head) * 2 * R
        until = tl.load(sums_ptr + kept - 1, mask=kept > 0, other=0.0)
        # If the base is older than the piece, its sums go on from the ring's.
        before = tl.load(own_decays_ptr + (start + 2 * R - 1) % (2 * R), mask=kept < 0, other=0.0)
        index = tl.maximum(kept, 0) + tl.arange(0, R)
        is_new = begin + index < end
        sums = tl.load(sums_ptr + index, mask=is_new, other=0.0)
        tl.debug_barrier()
        at = (position + index) % (2 * R)
        tl.store(own_decays_ptr + at, sums - until + before, mask=is_new)
        if head < KEY_HEADS:
            k_index = tl.arange(0, K)
            token = (begin + index).to(tl.int64)
            source = qkv_ptr + token[:, None] * qkv_stride + (KEY_HEADS + head) * K + k_index[None, :]
            key = tl.load(source, mask=is_new[:, None], other=0.0)
            target = keys_ptr + ((row * KEY_HEADS + head) * 2 * R + at[:, None]) * K + k_index[None, :]
            tl.store(target, key, mask=is_new[:, None])


def chunked(
    out: Tensor,
    qkv: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    shape: DeltaRuleShape,
    state: DeltaRuleState,
    tokens: TokenRows,
    pieces: Pieces,
    pdl: bool = False,
) -> None:
    """Run the delta rule over the tokens of pieces; see the oracle.

    Arguments are those of `single_tokens`, which also checks them.
    """
    heads, ring, launch = shape.value_heads, state.ring, {"launch_pdl": True} if pdl else {}
    most, spans = len(pieces.pieces), len(pieces.spans)
    solved, scores = torch.empty(2, most, heads, PIECE, PIECE, dtype=qkv.dtype, device=qkv.device)
    sums = torch.empty(most, heads, PIECE, dtype=torch.float32, device=qkv.device)
    sizes = {"KEY_HEADS": shape.key_heads, "HEADS": heads, "K": shape.key_dim, "PIECE": PIECE, "PDL": pdl}
    # In float32, two stages would exceed the shared memory of smaller GPUs.
    precision, stages = ("tf32x3", 1) if qkv.dtype == torch.float32 else ("tf32", STATE_STAGES)
    _piece_matrices_kernel[(most, heads)](
        *(solved, scores, sums, qkv, gates, a_log, dt_bias, pieces.counts, pieces.pieces),
        *(qkv.stride(0), gates.stride(0)),
        **sizes,
        PRECISION=precision,
        num_warps=MATRIX_WARPS,
        **launch,
    )
    block = min(VALUE_BLOCK, shape.value_dim)
    found = (tokens.rows, tokens.positions, pieces.counts, pieces.pieces, pieces.spans, qkv.stride(0))
    _row_states_kernel[(spans, heads, shape.value_dim // block)](
        *(out, qkv, solved, scores, sums, state.base, state.updates, state.keys, state.decays),
        *found,
        **sizes,
        V=shape.value_dim,
        R=ring,
        U=state.num_updates,
        BLOCK=block,
        STAGES=stages,
        PRECISION=precision,
        num_warps=STATE_WARPS,
        **launch,
    )
    _keep_ring_kernel[(spans, heads)](
        *(state.keys, state.decays, qkv, sums), *found, **sizes, R=ring, num_warps=1, **launch
    )
