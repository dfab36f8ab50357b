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

from tandem.engine_core.kernels.delta_rule.single_tokens import log_decay
from tandem.engine_core.kernels.delta_rule.state import PIECE, DeltaRuleShape, DeltaRuleState, Pieces, TokenRows
from tandem.engine_core.kernels.dependent_launch import wait_for_previous

VALUE_BLOCK = 32
"""Value channels of a program of the second launch."""
MATMUL_WARPS = 2
"""Warps of the kernels with matmuls. Four would use wgmma on Hopper, for which Triton 3.6 and 3.7 can generate invalid
reads of shared memory in kernels with several matmuls of 64 rows (triton-lang/triton#11366)."""


@triton.jit
def _join_blocks(inverse, below, PRECISION: tl.constexpr):
    """Return (D^-1 + L)^-1 for a block-diagonal D and blocks L below the diagonal of D^-1.

    Four blocks are joined, so N = D L is nilpotent, N^4 = 0, and the result is (I - N)(I + N^2) D. inverse: D; below:
    L.
    """
    n = tl.dot(inverse, below, input_precision=PRECISION)
    square = tl.dot(n, n, input_precision=PRECISION)
    product = inverse - tl.dot(n, inverse, input_precision=PRECISION)
    return product + tl.dot(square, product, input_precision=PRECISION)


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
    index, k_index = tl.arange(0, PIECE), tl.arange(0, K)
    wait_for_previous(PDL)
    if piece < tl.load(counts_ptr):
        first, end = tl.load(pieces_ptr + 2 * piece), tl.load(pieces_ptr + 2 * piece + 1)
        token = (first + index).to(tl.int64)
        inside = token < end
        source = qkv_ptr + token[:, None] * qkv_stride + key_head * K + k_index[None, :]
        query = tl.load(source, mask=inside[:, None], other=0.0)
        key = tl.load(source + KEY_HEADS * K, mask=inside[:, None], other=0.0)
        gate = gates_ptr + token * gates_stride
        beta = tl.where(inside, tl.sigmoid(tl.load(gate + head, mask=inside, other=0.0).to(tl.float32)), 0.0)
        decay = tl.where(inside, log_decay(gate, a_log_ptr, dt_bias_ptr, head, inside, HEADS), 0.0)
        sums = tl.cumsum(decay, 0)
        line, column = index[:, None], index[None, :]
        ratio = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
        products = tl.dot(key, tl.trans(key), input_precision=PRECISION)
        system = tl.where(line > column, beta[:, None] * ratio * products, 0.0)
        # Join blocks of 1 into blocks of 4, then of 16, then all. Powers of the whole A would grow beyond what float32
        # cancels. The loop is not unrolled, which keeps the code small.
        inverse = tl.where(line == column, 1.0, 0.0)
        for level in range(3):
            inner, outer = 1 << (2 * level), 4 << (2 * level)
            joined = (line // outer == column // outer) & (line // inner != column // inner)
            inverse = _join_blocks(inverse, tl.where(joined, system, 0.0), PRECISION)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        scores = tl.where(line >= column, ratio * scores, 0.0)
        number = (piece * HEADS + head).to(tl.int64)
        matrix = number * (PIECE * PIECE) + line * PIECE + column
        tl.store(solved_ptr + matrix, (inverse * beta[None, :]).to(solved_ptr.dtype.element_ty))
        tl.store(scores_ptr + matrix, scores.to(scores_ptr.dtype.element_ty))
        tl.store(sums_ptr + number * PIECE + index, sums)


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
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    span, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = head // (HEADS // KEY_HEADS)
    index, k_index, v_index = tl.arange(0, PIECE), tl.arange(0, K), part * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    if span < tl.load(counts_ptr + 1):
        first_piece, end_piece = tl.load(spans_ptr + 2 * span), tl.load(spans_ptr + 2 * span + 1)
        first = tl.load(pieces_ptr + 2 * first_piece)
        end = tl.load(pieces_ptr + 2 * end_piece - 1)
        row = tl.load(rows_ptr + first).to(tl.int64)
        start = tl.load(positions_ptr + first).to(tl.int32)
        own_base_ptr = base_ptr + (row * HEADS + head) * K * V + k_index[:, None] * V + v_index[None, :]
        own_updates_ptr = updates_ptr + (row * HEADS + head) * U * V
        own_keys_ptr = keys_ptr + (row * KEY_HEADS + key_head) * 2 * R * K
        own_decays_ptr = decays_ptr + (row * HEADS + head) * 2 * R
        state = tl.load(own_base_ptr, mask=(start > 0) & (k_index[:, None] >= 0), other=0.0)
        in_ring = tl.where(start > 0, (start + R - 1) % R + 1, 0)
        total = tl.load(own_decays_ptr + (start + 2 * R - 1) % (2 * R), mask=start > 0, other=0.0)
        state = state * tl.exp(total)
        for back in range(1, in_ring + 1):
            at = start - back
            weight = tl.exp(total - tl.load(own_decays_ptr + at % (2 * R)))
            old_key = tl.load(own_keys_ptr + (at % (2 * R)) * K + k_index).to(tl.float32) * weight
            state += old_key[:, None] * tl.load(own_updates_ptr + (at % U) * V + v_index)[None, :]
        # The ring's last boundary before the end, and the first token behind it.
        after = start + end - first
        boundary = after - ((after + R - 1) % R + 1)
        for piece in range(first_piece, end_piece):
            begin, stop = tl.load(pieces_ptr + 2 * piece), tl.load(pieces_ptr + 2 * piece + 1)
            token = (begin + index).to(tl.int64)
            inside = token < stop
            source = qkv_ptr + token[:, None] * qkv_stride
            query = tl.load(source + key_head * K + k_index[None, :], mask=inside[:, None], other=0.0)
            key = tl.load(source + (KEY_HEADS + key_head) * K + k_index[None, :], mask=inside[:, None], other=0.0)
            value = tl.load(source + 2 * KEY_HEADS * K + head * V + v_index[None, :], mask=inside[:, None], other=0.0)
            number = (piece * HEADS + head).to(tl.int64)
            matrix = number * (PIECE * PIECE) + index[:, None] * PIECE + index[None, :]
            solved, scores = tl.load(solved_ptr + matrix), tl.load(scores_ptr + matrix)
            sums = tl.load(sums_ptr + number * PIECE + index)
            last = tl.load(sums_ptr + number * PIECE + PIECE - 1)
            rounded = state.to(key.dtype)
            scale = tl.exp(sums)[:, None]
            target = value.to(tl.float32) - scale * tl.dot(key, rounded, input_precision=PRECISION)
            update = tl.dot(solved, target.to(solved.dtype), input_precision=PRECISION)
            result = scale * tl.dot(query, rounded, input_precision=PRECISION)
            result += tl.dot(scores, update.to(scores.dtype), input_precision=PRECISION)
            target_ptr = out_ptr + (token[:, None] * HEADS + head) * V + v_index[None, :]
            tl.store(target_ptr, result.to(out_ptr.dtype.element_ty), mask=inside[:, None])
            if piece == end_piece - 1:
                # The base covers `kept` tokens of this piece. If that is negative, it ends before the piece.
                kept = boundary - (start + begin - first)
                if kept >= 0:
                    until = tl.load(sums_ptr + number * PIECE + kept - 1, mask=kept > 0, other=0.0)
                    weight = tl.where(index < kept, tl.exp(tl.minimum(until - sums, 0.0)), 0.0)
                    weighted = (update * weight[:, None]).to(key.dtype)
                    added = tl.dot(tl.trans(key), weighted, input_precision=PRECISION)
                    tl.store(own_base_ptr, state * tl.exp(until) + added)
                position = start + begin - first + index
                newest = inside & (index >= kept)
                update_ptr = own_updates_ptr + (position % U)[:, None] * V + v_index[None, :]
                tl.debug_barrier()
                tl.store(update_ptr, update, mask=newest[:, None])
            weighted = (update * tl.exp(last - sums)[:, None]).to(key.dtype)
            state = state * tl.exp(last) + tl.dot(tl.trans(key), weighted, input_precision=PRECISION)


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
        begin_position = start + begin - first
        after = start + end - first
        kept = after - ((after + R - 1) % R + 1) - begin_position
        number = (piece * HEADS + head).to(tl.int64) * PIECE
        own_decays_ptr = decays_ptr + (row * HEADS + head) * 2 * R
        until = tl.load(sums_ptr + number + kept - 1, mask=kept > 0, other=0.0)
        # If the base is older than the piece, its sums go on from the ring's.
        before = tl.load(own_decays_ptr + (start + 2 * R - 1) % (2 * R), mask=kept < 0, other=0.0)
        index = tl.maximum(kept, 0) + tl.arange(0, R)
        is_new = begin + index < end
        sums = tl.load(sums_ptr + number + index, mask=is_new, other=0.0)
        tl.debug_barrier()
        at = (begin_position + index) % (2 * R)
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
    precision = "tf32x3" if qkv.dtype == torch.float32 else "tf32"
    _piece_matrices_kernel[(most, heads)](
        *(solved, scores, sums, qkv, gates, a_log, dt_bias, pieces.counts, pieces.pieces),
        *(qkv.stride(0), gates.stride(0)),
        **sizes,
        PRECISION=precision,
        num_warps=MATMUL_WARPS,
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
        PRECISION=precision,
        num_warps=MATMUL_WARPS,
        num_stages=2,
        **launch,
    )
    _keep_ring_kernel[(spans, heads)](
        *(state.keys, state.decays, qkv, sums), *found, **sizes, R=ring, num_warps=1, **launch
    )
