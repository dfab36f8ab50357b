"""The gated delta rule and the operations around it in plain torch: the oracle of the kernels, and the CPU's path.

Names and layouts are those of `kernels.delta_rule.state`; all arithmetic is in float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.delta_rule.state import (
    L2_EPS,
    PIECE,
    DeltaRuleShape,
    DeltaRuleState,
    TokenRows,
    base_length,
)


class TokenSpan(NamedTuple):
    """Adjacent tokens of one row."""

    row: int
    first: int
    """Index of the first token."""
    start: int
    """Its position."""
    length: int


def find_spans(tokens: TokenRows) -> list[TokenSpan]:
    """Return the tokens of each row but the padding, in order."""
    spans: list[TokenSpan] = []
    for index, (row, position) in enumerate(zip(tokens.rows.tolist(), tokens.positions.tolist(), strict=True)):
        last = spans[-1] if spans else None
        if not row:
            continue
        if last is not None and (row, index, position) == (
            last.row,
            last.first + last.length,
            last.start + last.length,
        ):
            spans[-1] = last._replace(length=last.length + 1)
        else:
            spans.append(TokenSpan(row, index, position, 1))
    return spans


def find_pieces(_tokens: TokenRows) -> None:
    """Return None in place of a step's `Pieces`, which only kernels need."""


def short_conv(
    x: Tensor, weight: Tensor, shape: DeltaRuleShape, state: DeltaRuleState, tokens: TokenRows, _pieces: None
) -> Tensor:
    """Apply the causal convolution over each row's positions, then SiLU; normalize queries and keys.

    Queries are also divided by the square root of the key size. x: [T, at least channels], inputs in the first
    channels; weight: [channels, 1, conv_width], the newest position last. Returns [T, channels] in x's dtype, and
    updates `state.columns`.
    """
    x, width, columns = x[:, : shape.channels], shape.conv_width, state.columns.shape[1]
    out = torch.zeros_like(x)
    for row, first, start, length in find_spans(tokens):
        own = x[first : first + length]
        before = torch.arange(start - width + 1, start, device=x.device)
        kept = torch.where((before >= 0)[:, None], state.columns[row, before % columns], 0)
        seen = torch.cat((kept, own)).float()
        mixed = functional.conv1d(seen.t()[None], weight.float(), groups=shape.channels)[0].t()
        out[first : first + length] = functional.silu(mixed).to(x.dtype)
        newest = torch.arange(max(0, length - columns), length, device=x.device)
        state.columns[row, (start + newest) % columns] = own[newest]
    heads = out[:, : 2 * shape.key_heads * shape.key_dim].view(len(x), 2, shape.key_heads, shape.key_dim)
    wide = heads.float()
    wide = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)
    wide[:, 0] *= shape.key_dim**-0.5
    heads.copy_(wide)
    return out


def delta_rule(
    qkv: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    shape: DeltaRuleShape,
    state: DeltaRuleState,
    tokens: TokenRows,
    _pieces: None,
) -> Tensor:
    """Run the gated delta rule over each row's tokens and update its memory.

    qkv: [T, channels] as `short_conv` returns it; gates: [T, 2 * value_heads], b and a: beta is sigmoid(b), and g is
    -exp(a_log) softplus(a + dt_bias); a_log, dt_bias: [value_heads] float32. Returns o, [T, value_heads, value_dim] in
    qkv's dtype, zeros for padding.
    """
    out = qkv.new_zeros(len(qkv), shape.value_heads, shape.value_dim)
    repeats, keys_end = shape.value_heads // shape.key_heads, 2 * shape.key_heads * shape.key_dim
    heads = qkv[:, :keys_end].float().view(len(qkv), 2, shape.key_heads, shape.key_dim)
    query, key = heads.repeat_interleave(repeats, 2).unbind(1)
    value = qkv[:, keys_end:].float().view(len(qkv), shape.value_heads, shape.value_dim)
    beta = gates[:, : shape.value_heads].float().sigmoid()
    decay = -a_log.exp() * functional.softplus(gates[:, shape.value_heads :].float() + dt_bias)
    if tokens.queries > 1:
        for number in range(tokens.queries):
            index = torch.arange(number, len(qkv), tokens.queries, device=qkv.device)
            index = index[tokens.rows[index] > 0]
            given = (query[index], key[index], value[index], beta[index], decay[index])
            rows, positions = tokens.rows[index].long(), tokens.positions[index].long()
            # After its first token a row has the base that it keeps until drafts are accepted.
            bases = (positions - number) // state.ring * state.ring if number else None
            out[index] = _single(*given, rows, positions, state, bases).to(out.dtype)
        return out
    spans = find_spans(tokens)
    singles = [span for span in spans if span.length == 1]
    if singles:
        index = torch.tensor([span.first for span in singles], device=qkv.device)
        given = (query[index], key[index], value[index], beta[index], decay[index])
        rows, positions = tokens.rows[index].long(), tokens.positions[index].long()
        out[index] = _single(*given, rows, positions, state).to(out.dtype)
    for span in spans:
        if span.length > 1:
            own = slice(span.first, span.first + span.length)
            given = (query[own], key[own], value[own], beta[own], decay[own])
            out[own] = _span(*given, span, state).to(out.dtype)
    return out


def fold_accepted(states: DeltaRuleState, rows: Tensor, lengths: Tensor, counts: Tensor) -> None:
    """Write the base of rows whose accepted tokens have passed a multiple of the ring's size.

    Afterwards each row has the memory that steps without drafts leave: a base of `base_length` tokens.

    states: of all layers, as `ModelStates.stacked`; rows: [B] int32, 0 for padding; lengths: number of tokens of each
    row, the last of which is not computed yet; counts: [B] int32, number of new tokens in the lowest 8 bits.
    """
    ring = states.ring
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        computed = int(lengths[row]) - 1
        before = (computed - (count & 0xFF)) // ring * ring
        after = base_length(computed, ring)
        if not row or not count & 0xFF or after <= before:
            continue
        for tensors in zip(*states.tensors, strict=True):
            layer = DeltaRuleState(*tensors)
            own = torch.tensor([[row], [after], [before]], device=rows.device)
            matrix, total = fold(layer, *own)
            layer.base[row] = matrix[0]
            at = torch.arange(after, computed, device=rows.device) % (2 * ring)
            layer.decays[row, :, at] -= total[0][:, None]


def fold(state: DeltaRuleState, rows: Tensor, positions: Tensor, bases: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return S of rows after the tokens before given positions, and the sum of their decays since the base.

    rows, positions: [B] int64; bases: [B] int64, number of tokens in each base; None: as `base_length` says. Returns
    [B, value_heads, key_dim, value_dim] and [B, value_heads].
    """
    ring, size = state.ring, state.num_updates
    at = positions[:, None] - torch.arange(1, size + 1, device=rows.device)
    count = torch.where(positions > 0, (positions - 1) % ring + 1, 0) if bases is None else positions - bases
    valid = (positions[:, None] - at <= count[:, None])[..., None]
    keys = state.keys[rows[:, None], :, at % (2 * ring)].float()
    updates = state.updates[rows[:, None], :, at % size]
    decays = state.decays[rows[:, None], :, at % (2 * ring)]
    total = torch.where((count > 0)[:, None], decays[:, 0], 0)
    weights = torch.where(valid, (total[:, None] - decays).exp(), 0)
    keys, updates = torch.where(valid[..., None], keys, 0), torch.where(valid[..., None], updates, 0)
    keys = keys.repeat_interleave(state.base.shape[1] // keys.shape[2], 2)
    added = torch.einsum("bjhk,bjhv->bhkv", keys * weights[..., None], updates)
    base = torch.where((positions > 0)[:, None, None, None], state.base[rows], 0)
    return base * total.exp()[..., None, None] + added, total


def _single(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    decay: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: DeltaRuleState,
    bases: Tensor | None = None,
) -> Tensor:
    """Run one token of each of B rows; return o, [B, value_heads, value_dim].

    bases: as in `fold`, of bases that are not written.
    """
    ring = state.ring
    matrix, total = fold(state, rows, positions, bases)
    is_full = positions % ring == 0 if bases is None else torch.zeros_like(rows, dtype=torch.bool)
    state.base[rows[is_full]] = matrix[is_full]
    matrix = matrix * decay.exp()[..., None, None]
    update = beta[..., None] * (value - torch.einsum("bhkv,bhk->bhv", matrix, key))
    state.updates[rows, :, positions % state.num_updates] = update
    state.decays[rows, :, positions % (2 * ring)] = torch.where(is_full[:, None], 0, total) + decay
    repeats = key.shape[1] // state.keys.shape[1]
    state.keys[rows, :, positions % (2 * ring)] = key[:, ::repeats].to(state.keys.dtype)
    return torch.einsum("bhkv,bhk->bhv", matrix + key[..., None] * update[..., None, :], query)


def _span(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, span: TokenSpan, state: DeltaRuleState
) -> Tensor:
    """Run several tokens of one row in pieces; return o, [L, value_heads, value_dim]."""
    row, position, end, ring = span.row, span.start, span.start + span.length, state.ring
    kept = base_length(end, ring)
    matrices, totals = fold(state, *torch.tensor([[row], [position]], device=key.device))
    matrix, total, outputs, first = matrices[0], totals[0], [], 0
    while position < end:
        length = min(end, position - position % PIECE + PIECE) - position
        own = slice(first, first + length)
        q, k, v, b = (part[own].transpose(0, 1) for part in (query, key, value, beta))
        g = decay[own].transpose(0, 1).cumsum(-1)
        ratio = (g[:, :, None] - g[:, None]).tril().exp().tril()
        system = (b[..., None] * ratio * (k @ k.mT)).tril(-1)
        target = b[..., None] * (v - g.exp()[..., None] * (k @ matrix))
        update = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
        outputs.append(g.exp()[..., None] * (q @ matrix) + (ratio * (q @ k.mT)) @ update)
        if position + length == end:
            inside = kept - position
            if inside >= 0:
                total = g[:, inside - 1] if inside else torch.zeros_like(total)
                weighted = k[:, :inside] * (total[:, None] - g[:, :inside]).exp()[..., None]
                state.base[row] = total.exp()[:, None, None] * matrix + weighted.mT @ update[:, :inside]
                total = -total
            newest = torch.arange(max(0, inside), length, device=key.device)
            at = position + newest
            state.updates[row, :, at % state.num_updates] = update[:, newest]
            state.decays[row, :, at % (2 * ring)] = total[:, None] + g[:, newest]
            repeats = len(k) // state.keys.shape[1]
            state.keys[row, :, at % (2 * ring)] = k[::repeats, newest].to(state.keys.dtype)
        weighted = k * (g[:, -1:] - g).exp()[..., None]
        matrix = g[:, -1].exp()[:, None, None] * matrix + weighted.mT @ update
        position, first = position + length, first + length
    return torch.cat(outputs, 1).transpose(0, 1)


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, tokens: TokenRows) -> Tensor:
    """Return the RMSNorm of each value head times silu(gate), [T, value_heads * value_dim].

    o: [T, value_heads, value_dim]; gate: [T, value_heads * value_dim], rows contiguous; weight: [value_dim] in o's
    dtype. The norm is rounded to o's dtype before and after its multiplication with the weight, as in transformers.
    Zeros for padding.
    """
    normed = functional.rms_norm(o.float(), o.shape[-1:], None, eps).to(o.dtype) * weight
    product = normed.flatten(1).float() * functional.silu(gate.float())
    return torch.where((tokens.rows > 0)[:, None], product, 0).to(o.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate), shaped like x.

    x: [T, heads * head_dim]; gate: [T, heads, head_dim], heads contiguous. The sigmoid is rounded to x's dtype.
    """
    return x * gate.sigmoid().flatten(1)
