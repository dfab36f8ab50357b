"""Packing of a step plan into one array of int32.

A single copy takes everything to the device. The fields follow one another, each as long as this step needs it; floats
travel as their bits, int64 fields are 8-byte aligned.

Always there, in this order:
    token_rows, positions [T]: row and position of every token; position -1 is the row's newest token, which the device
        knows. Without a bucket the tokens are in the plan's order. With one they are where its graph reads them, and T
        is the bucket's size, padded with row 0, position 0.
    sample_index [S]: indices of the samples among the T tokens. In a bucket with prompts -1 pads it to the graph's
        sample capacity; it is left out of a bucket without prompts, in which token i is sample i.
    sample_rows [S]: row of each token whose logits are sampled from.
Only in steps that need them:
    mask_index [S]: index of the row's mask on the device, 0 for the mask that allows everything. In a step that
        verifies drafts, of each sampled position: a row with a mask has no drafts, so its first position has it.
    score_index, prompt_logprob_ids [P]: indices of the scored positions among the T tokens, and the tokens that follow
        them.
    record_index [R]: samples whose log-probabilities are wanted, added by the runtime.
    upload_index [U] int64, upload_tokens [U]: new tokens, at indices of the flat token table.
    length_rows [L] int64, lengths [L]: rows with uploaded tokens, and how many tokens of each are known then.
    page_index [G] int64, pages [G]: new pages, at indices of the flat table of all groups' pages.
    ints [A * INT_COLUMNS] int64, floats [A * FLOAT_COLUMNS], suppressed [A * MAX_SUPPRESSED]: parameters of A admitted
        rows, as in the sampling tables.
    bias_index, bias_ids, biases [B]: their biases, at indices of the flat bias table, if any row has one.
    draft_rows, draft_positions [D], draft_end_rows [N] int64, draft_ends [N]: row and position of each token of the
        plan's `draft_spans`, and row and end of each of these.
    predictions [P]: the predictions of those of them that have one, concatenated; their lengths are among `ints`.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tandem.engine_core.kernels.sampling.inputs import FLOAT_COLUMNS, INT_COLUMNS, UPDATE_FIELDS
from tandem.engine_core.page_counts import PageColumns
from tandem.engine_core.plan import PADDING_ROW, DraftSpan, NewSequence, ScheduledSequence, StepPlan
from tandem.engine_core.runtime.graph_bucket import GraphBucket
from tandem.protocol.codec import ID_BYTES, unpack_floats, unpack_ids
from tandem.protocol.params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SAMPLING_FIELDS

Ints = NDArray[np.int32]

NEWEST = -1
"""Placeholder for the position of the row's newest token."""
MAX_END_IDS = 32
"""End ids that one model may have."""
MAX_SUPPRESSED = MAX_STOP_TOKEN_IDS + MAX_END_IDS
"""Ids that one row may suppress: its stop ids and the model's own end ids."""
_INT_FIELDS = tuple(field.name for field in SAMPLING_FIELDS if field.is_integer)


@dataclass(slots=True)
class Packed:
    """Location of each field of a step in the packed array.

    It also holds the facts about the step that the host needs.
    """

    out: Ints
    """Array that the fields are written to."""
    sample_rows: Ints
    """[S], the content of the field of that name."""
    sample_positions: Ints
    """[S], position of each token whose logits are sampled from, as the host counts it: a lower bound (I9)."""
    longest: int
    """Upper bound of the positions that any row attends to (I9)."""
    fields: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Offset and length of each field, in words, by name."""
    total: int = 0
    """Number of words written."""

    def add(self, name: str, values: Ints, padded: int = 0) -> None:
        """Append a field, filled up with zeros to a length of `padded`."""
        start, length = self.total, len(values)
        self.out[start : start + length] = values
        if padded > length:
            self.out[start + length : start + padded] = 0
            length = padded
        self.fields[name] = (start, length)
        self.total = start + length

    def reserve(self, name: str, length: int) -> Ints:
        """Append a field of zeros, and return it for writing."""
        words = self.out[self.total : self.total + length]
        words[:] = 0
        self.fields[name] = (self.total, length)
        self.total += length
        return words

    def add_wide(self, name: str, values: NDArray[np.int64]) -> None:
        """Append a field of 64-bit integers.

        The device can read them as they are.
        """
        self.total += self.total % 2
        self.add(name, values.view(np.int32))

    def read(self, name: str) -> Ints:
        """Return the words of a field on the host."""
        start, length = self.fields[name]
        return self.out[start : start + length]

    @property
    def has_updates(self) -> bool:
        """True if there are `UPDATE_FIELDS`: the others come with these three."""
        return "upload_index" in self.fields or "page_index" in self.fields or "ints" in self.fields

    def locate_updates(self) -> list[tuple[int, int]]:
        """Return offset and length, in words, of each of the `UPDATE_FIELDS`.

        They are zeros for one that is missing.
        """
        return [self.fields.get(name, (0, 0)) for name in UPDATE_FIELDS]

    def share(self, name: str, other: str, length: int) -> None:
        """Let a field be the beginning of another field with the same content."""
        self.fields[name] = (self.fields[other][0], length)


def capacity(
    max_rows: int,
    max_step_tokens: int,
    pages: int,
    uploads: int,
    max_prediction: int = 0,
    has_draft_model: bool = False,
) -> int:
    """Return the maximum number of int32 words that a step can need.

    pages: entries of page tables that it can upload; uploads: tokens that it can upload but not compute;
    max_prediction: tokens of the prediction of a row; has_draft_model: True if a step may have `draft_spans`.
    """
    drafts = 2 * max_step_tokens + 3 * max_rows + 2 if has_draft_model else 0
    admissions = max_rows * (2 * len(INT_COLUMNS) + len(FLOAT_COLUMNS) + MAX_SUPPRESSED + 3 * MAX_LOGIT_BIAS)
    admissions += max_rows * max_prediction
    return drafts + 7 * max_step_tokens + 3 * (uploads + pages) + 9 * max_rows + admissions + 4


def pack(
    plan: StepPlan,
    max_len: int,
    columns: Sequence[PageColumns],
    out: Ints,
    bucket: GraphBucket | None = None,
    sample_capacity: int = 0,
) -> Packed:
    """Write a plan into `out`, with the fields that the module docstring describes.

    max_len: columns of the token table; columns: of each KV group in the page table; bucket: of the graph that runs
    the step, which the plan has to fit, or None for a step that no graph holds; sample_capacity: number of samples that
    the graph of a bucket with prompts has room for.
    """
    if plan.is_decode_only and (bucket is None or not bucket.num_prefill_tokens):
        packed = _pack_decode(plan, out, bucket)
    else:
        packed = _pack_mixed(plan, out, bucket, sample_capacity)
    if plan.needs_mask:
        masked = np.array([r.constrained for r in plan.rows if r.samples], dtype=np.int32)
        index = np.zeros((len(masked), 1 + plan.num_drafts), dtype=np.int32)
        index[:, 0] = np.cumsum(masked, dtype=np.int32) * masked
        packed.add("mask_index", index.reshape(-1))
    if plan.draft_spans:
        _add_draft_spans(plan.draft_spans, packed)
    if plan.updated_rows:
        _add_updates(plan, max_len, columns, packed)
    if plan.admitted:
        _add_admissions(plan.admitted, packed)
    return packed


def _pack_decode(plan: StepPlan, out: Ints, bucket: GraphBucket | None) -> Packed:
    """Pack the tokens of a step with one sampled token per row.

    Rows, tokens and samples are the same there.
    """
    row = np.array([r.row for r in plan.rows], dtype=np.int32)
    start = np.array([r.start for r in plan.rows], dtype=np.int32)
    count = len(row)
    packed = Packed(out, row, start, int(start.max()) + 1 + plan.max_lead + plan.num_drafts)
    size = count if bucket is None else sum(bucket)
    packed.add("token_rows", row, size)
    packed.add("positions", np.full(count, NEWEST, dtype=np.int32), size)
    packed.share("sample_rows", "token_rows", count)
    if bucket is None:
        packed.add("sample_index", np.arange(count, dtype=np.int32))
    return packed


def _pack_mixed(plan: StepPlan, out: Ints, bucket: GraphBucket | None, sample_capacity: int) -> Packed:
    """Pack the tokens of a step with rows of any length, sampled or not.

    The steady rows have the first slots and the first samples. Single tokens are written at once; the few longer rows
    follow one by one.
    """
    steady, others = plan.num_steady, plan.other_rows
    row = np.array([r.row for r in plan.rows], dtype=np.int32)
    start = np.array([r.start for r in plan.rows], dtype=np.int32)
    length = np.array([r.length for r in others], dtype=np.int32)
    end = start + 1
    end[steady:] += length - 1
    samples = np.ones(len(row), dtype=bool)
    samples[steady:] = [r.samples for r in others]
    packed = Packed(out, row[samples], end[samples] - 1, int(end.max()) + plan.max_lead)
    slots = np.concatenate((np.arange(steady, dtype=np.int32), _first_slots(length, steady, bucket)))
    size = plan.total_tokens if bucket is None else sum(bucket)
    token_rows, positions = packed.reserve("token_rows", size), packed.reserve("positions", size)
    token_rows[slots] = row
    positions[slots] = NEWEST
    for index in np.flatnonzero(length > 1).tolist():
        r, slot = others[index], int(slots[steady + index])
        token_rows[slot : slot + r.length] = r.row
        positions[slot : slot + r.length] = np.arange(r.start, r.end, dtype=np.int32)
    count = len(packed.sample_rows)
    sample_index = packed.reserve("sample_index", max(sample_capacity, count))
    sample_index[:count] = (slots + (end - start) - 1)[samples]
    sample_index[count:] = -1
    packed.add("sample_rows", packed.sample_rows)
    scored = [(index, r) for index, r in enumerate(others) if r.prompt_logprob_ids]
    if scored:
        ids = [np.frombuffer(r.prompt_logprob_ids, np.int32) for _, r in scored]
        first = slots[[steady + index for index, _ in scored]]
        first += np.array([r.num_unscored for _, r in scored], dtype=np.int32)
        ranges = [np.arange(len(own), dtype=np.int32) + slot for own, slot in zip(ids, first, strict=True)]
        packed.add("score_index", np.concatenate(ranges))
        packed.add("prompt_logprob_ids", np.concatenate(ids))
    return packed


def _first_slots(length: Ints, steady: int, bucket: GraphBucket | None) -> Ints:
    """Return the first slot of each row after the steady ones.

    They follow in the plan's order. In a bucket single tokens come first, then the tokens of longer rows. length: of
    these rows; steady: number of the rows before them.
    """
    if bucket is None:
        return steady + np.cumsum(length, dtype=np.int32) - length
    is_single = length == 1
    single = steady + np.cumsum(is_single, dtype=np.int32) - 1
    tokens = np.where(is_single, 0, length)
    longer = bucket.num_decode_tokens + np.cumsum(tokens, dtype=np.int32) - tokens
    return np.where(is_single, single, longer)


def _add_draft_spans(spans: Sequence[DraftSpan], packed: Packed) -> None:
    """Add the tokens that the draft model computes as prompts."""
    rows = np.array([span.row for span in spans], dtype=np.int32)
    packed.add("draft_rows", np.repeat(rows, [span.length for span in spans]))
    ranges = [np.arange(span.start, span.end, dtype=np.int32) for span in spans]
    packed.add("draft_positions", np.concatenate(ranges))
    packed.add_wide("draft_end_rows", rows.astype(np.int64))
    packed.add("draft_ends", np.array([span.end for span in spans], dtype=np.int32))


def _add_updates(plan: StepPlan, max_len: int, columns: Sequence[PageColumns], packed: Packed) -> None:
    """Add the tokens and pages that the device does not know yet, if there are any."""
    starts: list[int] = []
    tokens: list[Ints] = []
    rows: list[int] = []
    lengths: list[int] = []
    paged: list[ScheduledSequence] = []
    for r in plan.updated_rows:
        if r.new_pages:
            paged.append(r)
        if r.tokens:
            starts.append(r.row * max_len + r.start - r.skipped)
            tokens.append(np.frombuffer(r.tokens, np.int32))
            rows.append(r.row)
            lengths.append(r.end if r.row != PADDING_ROW else 1)
    if tokens:
        ranges = [np.arange(first, first + len(ids), dtype=np.int64) for first, ids in zip(starts, tokens, strict=True)]
        packed.add_wide("upload_index", np.concatenate(ranges))
        packed.add("upload_tokens", np.concatenate(tokens))
        packed.add_wide("length_rows", np.array(rows, np.int64))
        packed.add("lengths", np.array(lengths, np.int32))
    if paged and len(columns) == 1 and not columns[0].ring:
        _add_pages(paged, columns[0].count, packed)
    elif paged:
        _add_group_pages(paged, columns, packed)


def _add_pages(paged: Sequence[ScheduledSequence], width: int, packed: Packed) -> None:
    """Add the new pages of rows of the only KV group.

    width: columns of the page table.
    """
    index: list[int] = []
    pages: list[int] = []
    for r in paged:
        first = r.row * width + r.first_page
        index += range(first, first + len(r.new_pages))
        pages += r.new_pages
    packed.add_wide("page_index", np.array(index, np.int64))
    packed.add("pages", np.array(pages, np.int32))


def _add_group_pages(paged: Sequence[ScheduledSequence], columns: Sequence[PageColumns], packed: Packed) -> None:
    """Add the new pages of all KV groups, to each of their columns.

    Of more pages than a group with a window keeps, only the last ones are added.
    """
    groups = len(columns)
    count = np.array([len(r.new_pages) // groups for r in paged])
    first = np.array([r.first_page for r in paged])
    pages = np.concatenate([np.array(r.new_pages, np.int32).reshape(groups, -1) for r in paged], axis=1)
    # Of each page: begin of its row in the table, its index in the row, and one past the row's last index.
    row = np.repeat(np.array([r.row for r in paged], np.int64) * sum(own.count for own in columns), count)
    number = np.arange(len(row)) + np.repeat(first - np.cumsum(count) + count, count)
    end = np.repeat(first + count, count)
    index: list[NDArray[np.int64]] = []
    values: list[Ints] = []
    for own, ids in zip(columns, pages, strict=True):
        if not own.ring:
            index.append(row + own.first + number)
            values.append(ids)
            continue
        kept = number >= end - own.ring
        column = (row + own.first + number % own.ring)[kept]
        index += (column, column + own.ring)
        values += (ids[kept],) * 2
    packed.add_wide("page_index", np.concatenate(index))
    packed.add("pages", np.concatenate(values))


def _add_admissions(admitted: tuple[NewSequence, ...], packed: Packed) -> None:
    """Add the sampling parameters of admitted rows."""
    ints, floats = array("q"), array("f")
    suppressed = np.full((len(admitted), MAX_SUPPRESSED), -1, dtype=np.int32)
    for index, a in enumerate(admitted):
        p = a.params
        ints.extend((a.row, a.prompt_len, a.prompt_len + p.max_tokens, p.min_tokens, p.choice, p.seed))
        ints.extend((a.max_drafts, len(a.prediction) // ID_BYTES))
        ints.append(a.adapter_slot)
        ints.extend([getattr(p, name) for name in _INT_FIELDS])
        floats.extend([getattr(p, name) for name in FLOAT_COLUMNS])
        if a.end_ids:
            # Requests beyond this limit, and beyond the limit of biases, are refused on arrival.
            assert len(a.end_ids) <= MAX_SUPPRESSED, f"{len(a.end_ids)} end ids"
            suppressed[index, : len(a.end_ids)] = a.end_ids
    packed.add_wide("ints", np.frombuffer(ints, dtype=np.int64))
    packed.add("floats", np.frombuffer(floats, dtype=np.int32))
    packed.add("suppressed", suppressed.reshape(-1))
    biased = [a for a in admitted if a.params.logit_bias_ids]
    if biased:
        _add_biases(biased, packed)
    predictions = b"".join([a.prediction for a in admitted])
    if predictions:
        packed.add("predictions", np.frombuffer(predictions, dtype=np.int32))


def _add_biases(biased: list[NewSequence], packed: Packed) -> None:
    """Add the biases of admitted rows that have some."""
    index: list[int] = []
    ids: list[int] = []
    values: list[float] = []
    for a in biased:
        own = unpack_ids(a.params.logit_bias_ids)
        # The next row's entries would be overwritten.
        assert len(own) <= MAX_LOGIT_BIAS, f"{len(own)} biases"
        index += range(a.row * MAX_LOGIT_BIAS, a.row * MAX_LOGIT_BIAS + len(own))
        ids += own
        values += unpack_floats(a.params.logit_bias_values)
    packed.add("bias_index", np.array(index, dtype=np.int32))
    packed.add("bias_ids", np.array(ids, dtype=np.int32))
    packed.add("biases", np.array(values, dtype=np.float32).view(np.int32))
