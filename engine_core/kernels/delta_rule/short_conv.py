"""Causal convolution over a few positions, SiLU, and the norms of queries and keys, in one launch.

A program computes one head of some tokens. A second launch keeps the newest inputs of rows with several tokens; single
tokens, and those that verify drafts, keep theirs in the first. Oracle: `reference.delta_rule.short_conv`. `pdl`: see
`kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# ruff: noqa: N803, RUF005

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.delta_rule.state import L2_EPS, DeltaRuleShape, DeltaRuleState, Pieces, TokenRows
from tandem.engine_core.kernels.dependent_launch import wait_for_previous

BLOCK = 8
"""Tokens of a program."""


@triton.jit
def _short_conv_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    columns_ptr,
    rows_ptr,
    positions_ptr,
    tokens,
    num_kept,
    x_stride,
    out_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    D: tl.constexpr,
    FIRST: tl.constexpr,
    NORMED: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = FIRST + head * D + tl.arange(0, D)
    inside = token < tokens
    # The preceding kernel, a matmul, writes only x.
    row = tl.load(rows_ptr + token, mask=inside, other=0)
    position = tl.load(positions_ptr + token, mask=inside, other=0).to(tl.int32)
    kept_ptr = columns_ptr + row.to(tl.int64) * (COLUMNS * CHANNELS)
    weights = (tl.load(weight_ptr + channel * WIDTH + WIDTH - 1),)
    in_step = ()
    kept = ()
    for distance in tl.static_range(1, WIDTH):
        # The token that far ahead belongs to this row if its row and position fit: a row's tokens are adjacent.
        has_token = inside & (token >= distance)
        other_row = tl.load(rows_ptr + token - distance, mask=has_token, other=-1)
        other_position = tl.load(positions_ptr + token - distance, mask=has_token, other=-1).to(tl.int32)
        is_same = has_token & (other_row == row) & (other_position == position - distance)
        in_state = inside & (row > 0) & (position >= distance) & (is_same == 0)
        own_kept_ptr = kept_ptr + (position + COLUMNS - distance) % COLUMNS * CHANNELS
        kept = kept + (tl.load(own_kept_ptr[:, None] + channel[None, :], mask=in_state[:, None], other=0.0),)
        in_step = in_step + (is_same,)
        weights = weights + (tl.load(weight_ptr + channel * WIDTH + WIDTH - 1 - distance),)
    wait_for_previous(PDL)
    x_token_ptr = x_ptr + token.to(tl.int64) * x_stride
    own = tl.load(x_token_ptr[:, None] + channel[None, :], mask=inside[:, None], other=0.0)
    total = own.to(tl.float32) * weights[0].to(tl.float32)[None, :]
    for distance in tl.static_range(1, WIDTH):
        other_ptr = (x_token_ptr - distance * x_stride)[:, None] + channel[None, :]
        seen = tl.load(other_ptr, mask=in_step[distance - 1][:, None], other=0.0).to(tl.float32)
        seen += kept[distance - 1].to(tl.float32)
        total += seen * weights[distance].to(tl.float32)[None, :]
    mixed = (total * tl.sigmoid(total)).to(out_ptr.dtype.element_ty)
    if NORMED > 0:
        wide = mixed.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) + EPS) * tl.where(head < KEY_HEADS, scale, 1.0)
        mixed = (wide * tl.where(head < NORMED, factor, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token.to(tl.int64)[:, None] * out_stride + channel[None, :], mixed, mask=inside[:, None])
    keeps = inside & (row > 0) & (token < num_kept)
    # Other programs read other entries: of a row's tokens in the step and the WIDTH - 1 before, each has its own.
    target = kept_ptr + (position % COLUMNS) * CHANNELS
    tl.store(target[:, None] + channel[None, :], own, mask=keeps[:, None])


@triton.jit
def _keep_columns_kernel(
    columns_ptr,
    x_ptr,
    rows_ptr,
    positions_ptr,
    counts_ptr,
    pieces_ptr,
    spans_ptr,
    x_stride,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    span = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    if span < tl.load(counts_ptr + 1):
        first = tl.load(pieces_ptr + 2 * tl.load(spans_ptr + 2 * span))
        end = tl.load(pieces_ptr + 2 * tl.load(spans_ptr + 2 * span + 1) - 1)
        row = tl.load(rows_ptr + first).to(tl.int64)
        for back in range(1, COLUMNS + 1):
            token = end - back
            mask = (channel < CHANNELS) & (token >= first)
            position = tl.load(positions_ptr + token, mask=token >= first, other=0).to(tl.int32)
            newest = tl.load(x_ptr + token.to(tl.int64) * x_stride + channel, mask=mask, other=0.0)
            tl.store(columns_ptr + (row * COLUMNS + position % COLUMNS) * CHANNELS + channel, newest, mask=mask)


def short_conv(
    x: Tensor,
    weight: Tensor,
    shape: DeltaRuleShape,
    state: DeltaRuleState,
    tokens: TokenRows,
    pieces: Pieces | None,
    pdl: bool = False,
) -> Tensor:
    """Apply the causal convolution, SiLU and the norms of heads; see the oracle.

    x: rows contiguous, and all that the preceding kernel may write with `pdl`; pieces: of the tokens after the single
    ones. Raises ValueError for head sizes that the kernels do not support.
    """
    shape.check_heads()
    count, launch = len(x), {"launch_pdl": True} if pdl else {}
    num_kept = tokens.num_single if tokens.queries == 1 else count
    out = torch.empty(count, shape.channels, dtype=x.dtype, device=x.device)
    if not count:
        return out
    block, columns = 1 if count <= BLOCK else BLOCK, state.columns.shape[1]
    normed, first_value = 2 * shape.key_heads, shape.channels - shape.values
    heads = [(normed, shape.key_dim, 0, normed), (shape.value_heads, shape.value_dim, first_value, 0)]
    if shape.key_dim == shape.value_dim:
        heads = [(normed + shape.value_heads, shape.key_dim, 0, normed)]
    for number, size, first, normed in heads:
        _short_conv_kernel[(triton.cdiv(count, block), number)](
            *(out, x, weight, state.columns, tokens.rows, tokens.positions, count, num_kept),
            *(x.stride(0), out.stride(0), shape.key_dim**-0.5),
            KEY_HEADS=shape.key_heads,
            D=size,
            FIRST=first,
            NORMED=normed,
            WIDTH=shape.conv_width,
            COLUMNS=columns,
            CHANNELS=shape.channels,
            EPS=L2_EPS,
            BLOCK=block,
            PDL=pdl,
            num_warps=1 if block == 1 else 4,
            **launch,
        )
    if pieces is not None:
        size = 1024
        _keep_columns_kernel[(len(pieces.spans), triton.cdiv(shape.channels, size))](
            *(state.columns, x, tokens.rows, tokens.positions, pieces.counts, pieces.pieces, pieces.spans, x.stride(0)),
            COLUMNS=columns,
            CHANNELS=shape.channels,
            BLOCK=size,
            PDL=pdl,
            num_warps=4,
            **launch,
        )
    return out
