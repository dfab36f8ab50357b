"""Verification of drafts in plain torch and Python: the oracles of the kernels, and the CPU implementation.

A step verifies the drafts of its rows: each row has `queries` adjacent tokens, its newest one and then its drafts. All
of them are computed and sampled as if the drafts were right. `accept` keeps the sampled tokens up to the first that
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
"""Bits of a row's entry of `counts` below the number of its drafts, and below their source; the lowest are the number
of its new tokens."""
FROM_CONTEXT, FROM_PREDICTION = 0, 1
"""Sources of drafts: the row's own tokens, or its request's prediction."""


class VerifyTokens(NamedTuple):
    """Tokens of a step that verifies drafts: B rows of `queries` adjacent ones."""

    input_ids: Tensor
    """[B * queries] int64."""
    slot_mapping: Tensor
    """[groups, B * queries] int64, slot of each token's key and value, for each KV group."""
    rows: Tensor
    """[B * queries] int32."""
    positions: Tensor
    """[B * queries] int32; tokens without a draft repeat the last position of their row that has one."""


class NgramRule(NamedTuple):
    """Matches that n-gram drafts need."""

    min_match: int
    """Minimum number of tokens of a match, at least 1."""
    max_match: int
    """Number of tokens from which no longer match is looked for."""
    max_scan: int
    """Positions before the newest in which matches are looked for."""


def row_int(tables: SamplingTables, row: int, name: str) -> int:
    """Return a row's entry of the integer table."""
    return int(tables.ints[row, INT_COLUMNS.index(name)])


def known_drafts(tables: SamplingTables, row: int, queries: int) -> list[int]:
    """Return the drafts of a row, up to the first missing one.

    At most queries - 1, and none at a position that is never computed: the last token of a row has no KV.
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

    Token i of a row is at the position of its newest token plus i. Missing drafts read the last position that has one,
    and write page 0. A row whose tokens are all known computes the last but one again, as in `decode_inputs`.

    tables: of R rows; page_tables: of each KV group; rows: [B] int32, below R; queries: tokens of a row; samples: [B *
    queries] int32 each, written: row and position of each token that is sampled from; 0 for the others, as for padding.
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
    """Give each row the tokens that follow its known ones.

    These are the sampled tokens up to the first that differs from its draft, that one included, and no more than the
    row may have. Only this writes the token table and the lengths in a step that verifies drafts. A token of -1, from
    a row without usable logits, equals no draft, and becomes 0 in the table; behind the first difference it changes
    nothing.

    rows: [B] int32, 0 for padding; sampled: [B * queries] int32, from the tokens of `verify_inputs`; sources: [B]
    int32, of the drafts; counts: [B] int32, written: the number of new tokens, of drafts (from DRAFTS_SHIFT on), and
    the source (from SOURCE_SHIFT on); 0 for padding.
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


def propose_ngrams(
    tables: SamplingTables, predictions: Tensor, rows: Tensor, drafts: int, sources: Tensor, rule: NgramRule
) -> None:
    """Write the n-gram drafts of each row into the token table, behind its known tokens.

    predictions: [R, P] int32, the text that each row's request predicts, of which the row has `prediction_len` tokens;
    rows: [B] int32, 0 for padding; drafts: number of drafts to write, -1 for missing ones, no more than the row's
    `max_drafts`; sources: [B] int32, written.
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
        if source == FROM_CONTEXT:  # What followed the match repeats.
            found = [found[index % len(found)] for index in range(wanted)] if found else []
        proposed = [*found[:wanted], *[-1] * drafts][:drafts]
        end = min(length + drafts, tables.tokens.shape[1])
        tables.tokens[row, length:end] = torch.tensor(proposed[: end - length], dtype=torch.int32)


def find_ngram(
    known: Sequence[int], prompt_len: int, prediction: Sequence[int], rule: NgramRule
) -> tuple[Sequence[int], int]:
    """Return what probably follows the known tokens, and its source.

    This is what follows the longest match of the last tokens: in the prediction, or, if that has a shorter one, in the
    known tokens. Of equal matches in the known tokens the most recent counts; in the prediction the nearest to the
    number of generated tokens, where a match that reaches back to the beginning of both counts as a longest one.
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
    """Return how many tokens before the end in a text equal the last known ones, at most `longest`."""
    count = 0
    while count < min(longest, end, len(known)) and text[end - 1 - count] == known[-1 - count]:
        count += 1
    return count
