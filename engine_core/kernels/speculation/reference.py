"""Verification of drafts in plain torch and Python: the oracles of the kernels, and the CPU implementation.

A step verifies the drafts of its rows: each row has `queries` adjacent tokens, its newest one and then its drafts. All
of them are computed and sampled as if the drafts were accepted. `accept` keeps the sampled tokens up to the first that
differs from its draft. Noise depends on the position alone, so a row gets the tokens that it gets without drafts
(drafter-invariant coupling: Daliri et al., 2024).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.sampling.inputs import INT_COLUMNS, SamplingTables

DRAFTS_SHIFT, SOURCE_SHIFT = 8, 16
"""Shifts of the number of drafts and of their source in an entry of `counts`; the lowest bits are the number of new
tokens."""
FROM_CONTEXT, FROM_PREDICTION = 0, 1
"""Sources of drafts: the row's own tokens, or its request's prediction."""


class VerifyTokens(NamedTuple):
    """Tokens of a step that verifies drafts: `queries` adjacent tokens for each of B rows."""

    input_ids: Tensor
    """[B * queries] int64."""
    slot_mapping: Tensor
    """[groups, B * queries] int64, slot of each token's key and value, for each KV group."""
    rows: Tensor
    """[B * queries] int32."""
    positions: Tensor
    """[B * queries] int32; tokens without a draft repeat the last position of their row that has one."""


class NgramRule(NamedTuple):
    """Limits of the matches of n-gram drafts."""

    min_match: int
    """Minimum number of tokens of a match, at least 1."""
    max_match: int
    """Maximum number of tokens of a match; longer ones count as this."""
    max_scan: int
    """Number of positions before the newest one that are searched."""


def row_int(tables: SamplingTables, row: int, name: str) -> int:
    """Return a row's entry of the integer table."""
    return int(tables.ints[row, INT_COLUMNS.index(name)])


def known_drafts(tables: SamplingTables, row: int, queries: int) -> list[int]:
    """Return the drafts of a row, up to the first missing one and at most queries - 1.

    Positions that are never computed have none: the last token of a row has no KV.
    """
    length, end = int(tables.lengths[row]), min(row_int(tables, row, "total_len") - 1, tables.tokens.shape[1])
    drafts = tables.tokens[row, length : min(length + queries - 1, max(end, length))].tolist()
    return drafts[: next((index for index, draft in enumerate(drafts) if draft < 0), len(drafts))]


def verify_inputs(
    tables: SamplingTables,
    page_tables: Sequence[PageTable],
    rows: Tensor,
    queries: int,
    samples: tuple[Tensor, Tensor],
) -> VerifyTokens:
    """Return the tokens of a step that verifies the drafts in the token table.

    Token i of a row has the position of its newest token plus i. A missing draft repeats the last position that has
    one, and writes to page 0. A row that has all its tokens recomputes the last but one, as in `decode_inputs`.

    tables: of R rows; page_tables: one per KV group; rows: [B] int32, below R; queries: tokens per row; samples: [B *
    queries] int32 each, written: row and position of each token to sample from, 0 for other tokens and padding.
    """
    positions, drafts = torch.zeros(2, len(rows), queries, dtype=torch.int64).unbind()
    is_sampled = torch.zeros(len(rows), queries, dtype=torch.bool)
    numbers = torch.arange(queries)
    for number, row in enumerate(rows.tolist()):
        if row == 0:
            continue
        drafts[number] = len(known_drafts(tables, row, queries))
        length, limit = int(tables.lengths[row]), row_int(tables, row, "total_len")
        positions[number] = max(min(length, limit - 1) - 1, 0) + torch.minimum(numbers, drafts[number])
        is_sampled[number] = (numbers <= drafts[number]) & (length < limit)
    device, token_rows = rows.device, rows.long().repeat_interleave(queries)
    position, sampled = positions.flatten().to(device), is_sampled.flatten().to(device)
    is_live = (numbers <= drafts).flatten().to(device)
    samples[0].copy_(torch.where(sampled, token_rows, 0))
    samples[1].copy_(torch.where(sampled, position, 0))
    slots = torch.stack([table.slots(token_rows, position) for table in page_tables])
    ids = tables.tokens[token_rows, position].long()
    return VerifyTokens(ids, torch.where(is_live, slots, 0), token_rows.int(), position.int())


def accept(
    tables: SamplingTables, rows: Tensor, queries: int, sampled: Tensor, sources: Tensor, counts: Tensor
) -> None:
    """Append the accepted tokens to each row.

    These are the sampled tokens up to and including the first that differs from its draft, within the maximum length of
    the row. A step that verifies drafts writes the token table and the lengths here only. A token of -1, from a row
    without usable logits, equals no draft and becomes 0 in the table; after the first difference it is ignored.

    rows: [B] int32, 0 for padding; sampled: [B * queries] int32, for the tokens of `verify_inputs`; sources: [B] int32,
    of the drafts; counts: [B] int32, written: numbers of new tokens and of drafts (shifted by DRAFTS_SHIFT), and the
    source (by SOURCE_SHIFT); 0 for padding.
    """
    for number, row in enumerate(rows.tolist()):
        if row == 0:
            counts[number] = 0
            continue
        drafts, length = known_drafts(tables, row, queries), int(tables.lengths[row])
        tokens = sampled[number * queries : (number + 1) * queries].tolist()
        accepted = next((i for i, draft in enumerate(drafts) if draft != tokens[i]), len(drafts))
        count = max(min(accepted + 1, row_int(tables, row, "total_len") - length), 0)
        for i in range(count):
            tables.tokens[row, length + i] = max(tokens[i], 0)
        tables.lengths[row] = length + count
        counts[number] = count | len(drafts) << DRAFTS_SHIFT | int(sources[number]) << SOURCE_SHIFT


class DraftState(NamedTuple):
    """What the KV cache of a draft model holds, by row."""

    lengths: Tensor
    """[R] int32, number of leading positions with keys and values of the draft model."""
    counts: Tensor
    """[R] int32, number of drafts that were written in the current step."""


def draft_inputs(
    tables: SamplingTables,
    page_tables: Sequence[PageTable],
    state: DraftState,
    rows: Tensor,
    queries: int,
    samples: tuple[Tensor, Tensor],
    index: Tensor,
    is_first: bool,
) -> VerifyTokens:
    """Return the tokens that the draft model computes before its next draft.

    Before the first draft of a step these are the newest token of a row and known tokens before it whose keys and
    values are missing, up to `queries` in all. A row that lacks more gets no draft, but makes up for `queries` of them.
    Before another draft it is the draft before. Other tokens repeat the last of their row, and write to page 0. A row
    that may have no draft computes nothing.

    page_tables: of the draft model's pool; rows: [B] int32, 0 for padding; samples: [B] int32 each, written: row and
    position of the token to sample from, 0 for a row without a draft; index: [B] int64, written: index of that token
    among the B * queries; is_first: True before the first draft of a step. `state` is updated.
    """
    positions, live = torch.zeros(2, len(rows), queries, dtype=torch.int64).unbind()
    numbers = torch.arange(queries)
    for number, row in enumerate(rows.tolist()):
        length, count = int(tables.lengths[row]), 0 if is_first else int(state.counts[row])
        wanted = min(row_int(tables, row, "max_drafts"), row_int(tables, row, "total_len") - 1 - length)
        end = length - 1 + count
        first = min(int(state.lengths[row]), end) if is_first else end
        is_live = row > 0 and count < wanted and int(tables.tokens[row, end]) >= 0
        num_live = min(queries, end - first + 1) if is_live else 0
        is_sampled = is_live and first + num_live > end
        live[number] = numbers < num_live
        if is_live:
            positions[number] = first + numbers.clamp(max=num_live - 1)
        samples[0][number], samples[1][number] = (row, end) if is_sampled else (0, 0)
        index[number] = number * queries + max(num_live - 1, 0)
        if is_first:
            state.counts[row] = 0
            if is_live:
                state.lengths[row] = first + num_live
    device, token_rows = rows.device, rows.long().repeat_interleave(queries)
    position = positions.flatten().to(device)
    slots = torch.stack([table.slots(token_rows, position) for table in page_tables])
    ids = tables.tokens[token_rows, position].long()
    return VerifyTokens(ids, torch.where(live.flatten().to(device) > 0, slots, 0), token_rows.int(), position.int())


def write_drafts(tables: SamplingTables, state: DraftState, rows: Tensor, sample_rows: Tensor, sampled: Tensor) -> None:
    """Write one draft of each row into the token table, after its known tokens and its drafts; -1 if it has none.

    rows: [B] int32, 0 for padding; sample_rows: [B] int32, as written by `draft_inputs`; sampled: [B] int32, -1 for a
    row without usable logits. `state` is updated.
    """
    for number, row in enumerate(rows.tolist()):
        at = int(tables.lengths[row]) + int(state.counts[row])
        if row == 0:
            continue
        if at < tables.tokens.shape[1]:
            tables.tokens[row, at] = sampled[number] if sample_rows[number] else -1
        state.counts[row] += 1


def note_accepted(tables: SamplingTables, state: DraftState, rows: Tensor, counts: Tensor) -> None:
    """Count the positions of accepted drafts that the draft model has computed: all but the last draft of a row.

    rows: [B] int32, 0 for padding; counts: [B] int32, as written by `accept`.
    """
    for row, packed in zip(rows.tolist(), counts.tolist(), strict=True):
        new, drafted = packed & 0xFF, packed >> DRAFTS_SHIFT & 0xFF
        if row and drafted:
            state.lengths[row] = int(tables.lengths[row]) - new + min(new, drafted) - 1


def propose_ngrams(
    tables: SamplingTables, predictions: Tensor, rows: Tensor, drafts: int, sources: Tensor, rule: NgramRule
) -> None:
    """Write the n-gram drafts of each row into the token table, after its known tokens.

    predictions: [R, P] int32, the text that each row's request predicts, `prediction_len` tokens long; rows: [B] int32,
    0 for padding; drafts: number of drafts to write, at most the row's `max_drafts`, then -1; sources: [B] int32,
    written.
    """
    for number, row in enumerate(rows.tolist()):
        sources[number] = FROM_CONTEXT
        if row == 0:
            continue
        length, limit = int(tables.lengths[row]), row_int(tables, row, "total_len")
        known = tables.tokens[row, :length].tolist()
        text = predictions[row, : row_int(tables, row, "prediction_len")].tolist()
        wanted = max(0, min(drafts, row_int(tables, row, "max_drafts"), limit - 1 - length))
        found, source = find_ngram(known, row_int(tables, row, "prompt_len"), text, rule) if wanted else ([], 0)
        sources[number] = source
        if source == FROM_CONTEXT:  # The tokens after the match repeat.
            found = [found[index % len(found)] for index in range(wanted)] if found else []
        proposed = [*found[:wanted], *[-1] * drafts][:drafts]
        end = min(length + drafts, tables.tokens.shape[1])
        tables.tokens[row, length:end] = torch.tensor(proposed[: end - length], dtype=torch.int32)


def find_ngram(
    known: Sequence[int], prompt_len: int, prediction: Sequence[int], rule: NgramRule
) -> tuple[Sequence[int], int]:
    """Return the probable continuation of the known tokens, and its source.

    It is the text after the longest match of the last tokens, in the prediction or in the known tokens; the prediction
    wins ties. Among equally long matches, the most recent of the known tokens is used, and the one in the prediction
    that is nearest to the number of generated tokens. There a match that covers all generated tokens has the maximum
    length.
    """
    longest, found, source = 0, known[:0], FROM_CONTEXT
    generated, nearest = len(known) - prompt_len, 0
    for end in range(len(prediction)):
        count = _match_length(prediction, end, known, rule.max_match)
        if end == generated and count >= min(generated, rule.max_match):
            count = rule.max_match
        distance = abs(end - generated)
        if count >= rule.min_match and (count > longest or (count == longest and distance <= nearest)):
            longest, found, source, nearest = count, prediction[end:], FROM_PREDICTION, distance
    least = max(len(known) - rule.max_scan, 1)
    for end in range(len(known) - 1, least - 1, -1):
        count = _match_length(known, end, known, rule.max_match)
        if count >= rule.min_match and count > longest:
            longest, found, source = count, known[end:], FROM_CONTEXT
    return found, source


def _match_length(text: Sequence[int], end: int, known: Sequence[int], longest: int) -> int:
    """Return the length, at most `longest`, of the match between a text before `end` and the last known tokens."""
    count = 0
    while count < min(longest, end, len(known)) and text[end - 1 - count] == known[-1 - count]:
        count += 1
    return count
