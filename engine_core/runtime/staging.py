"""A step plan as one packed array of int32, so that one copy takes everything to the device.

The fields lie one after the other, each as long as this step needs it; floats travel as their bits.
"""

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.engine_core.plan import NewSequence, StepPlan
from tandem.protocol.codec import unpack_floats, unpack_ids
from tandem.protocol.params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

Ints = NDArray[np.int32]

MAX_END_IDS = 32
"""End ids that one model may have."""
MAX_SUPPRESSED = MAX_STOP_TOKEN_IDS + MAX_END_IDS
"""Ids one row may suppress: its stop ids and the model's own end ids."""
ADMISSION_INTS = 6
"""row, prompt_len, top_k, choice, seed (low and high half)."""
ADMISSION_FLOATS = 6
"""temperature, top_p, min_p, repetition, presence and frequency penalty."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Where each field of a step lies in the packed array, and what the host has to know of it."""

    fields: dict[str, tuple[int, int]]
    """Name to (offset, length). Fields with the same content share their place."""
    total: int
    sample_rows: Ints
    longest: int
    """Most positions that any row's attention covers."""


def capacity(max_rows: int, max_step_tokens: int, pages: int, uploads: int) -> int:
    """Most int32 words that a step can need. pages: entries of page tables that it can bring; uploads: tokens that it
    can bring beside those that it computes."""
    admissions = max_rows * (ADMISSION_INTS + ADMISSION_FLOATS + 3 * (MAX_LOGIT_BIAS + MAX_SUPPRESSED))
    return 6 * max_step_tokens + 2 * (uploads + pages) + 8 * max_rows + admissions


def pack(plan: StepPlan, max_len: int, pages_per_row: int, out: Ints) -> Packed:
    """Writes a plan into `out`.

    Fields: token_rows, positions [T]; sample_rows, sample_positions [S]; sample_index [S + P], places among
    the T positions, of the samples first and then of the scored ones; suppress [S] if a row suppresses its end; targets
    [P] if any position is scored; mask_places [S] if a row is constrained; with tokens to upload, upload_index,
    upload_tokens [U] into the flat token table; with new pages, page_index, pages [P] into the flat page table; with
    admitted rows, ints [A * 6], floats [A * 6], bias_index, bias_ids, biases [B], suppress_index, suppressed [E].
    """
    row = np.array([r.row for r in plan.rows], dtype=np.int32)
    start = np.array([r.start for r in plan.rows], dtype=np.int32)
    if plan.is_decode_only:
        last = np.arange(len(row), dtype=np.int32)
        parts = {"token_rows": row, "positions": start}
        parts |= {"sample_index": last, "sample_rows": row, "sample_positions": start + 1} | restrictions(plan)
        parts |= new_pages(plan, pages_per_row)
        return lay_out(parts, out, row, int(start.max()) + 1)
    length = np.array([r.length for r in plan.rows], dtype=np.int32)
    last = np.cumsum(length, dtype=np.int32) - 1
    samples = np.array([r.samples for r in plan.rows], dtype=bool)
    end = start + length
    parts = {
        "token_rows": np.repeat(row, length),
        "positions": np.arange(plan.total_tokens, dtype=np.int32) - np.repeat(last + 1 - end, length),
        "sample_index": last[samples],
        "sample_rows": row[samples],
        "sample_positions": end[samples],
    } | restrictions(plan)
    if any(r.targets for r in plan.rows):
        pack_targets(plan, last + 1 - length, parts)
    parts |= uploads(plan, max_len) | new_pages(plan, pages_per_row)
    if plan.admitted:
        pack_admissions(plan.admitted, parts)
    return lay_out(parts, out, parts["sample_rows"], int(end.max()))


def pack_decode(plan: StepPlan, bucket: int, pages_per_row: int, out: Ints) -> Packed:
    """Writes a step of single positions where its bucket's graphs read it: rows, then positions, each padded with
    zeros. Behind lie new pages, if it brings any, and what only sampling needs, where that does not come out of a
    graph: sample_rows, sample_positions, suppress and mask_places [B]; all as in `pack`."""
    count = len(plan.rows)
    row = np.array([r.row for r in plan.rows], dtype=np.int32)
    position = np.array([r.start for r in plan.rows], dtype=np.int32)
    out[:count] = row
    out[count:bucket] = 0
    out[bucket : bucket + count] = position
    out[bucket + count : 2 * bucket] = 0
    fields = {"rows": (0, bucket), "positions": (bucket, bucket)}
    parts = new_pages(plan, pages_per_row)
    if not plan.is_unconstrained_decode:
        fields["sample_rows"] = (0, count)
        parts |= {"sample_positions": position + 1} | restrictions(plan)
    behind = lay_out(parts, out[2 * bucket :], row, int(position.max()) + 1)
    fields |= {name: (2 * bucket + offset, length) for name, (offset, length) in behind.fields.items()}
    return Packed(fields, 2 * bucket + behind.total, row, behind.longest)


def mask_places(plan: StepPlan) -> dict[int, int]:
    """Where the mask of each constrained row that samples lies, by the row's number in the device's tables.

    Place 0 is nobody's and allows everything; the others follow in the plan's order.
    """
    rows = [row.row for row in plan.rows if row.constrained and row.samples]
    return {row: place for place, row in enumerate(rows, start=1)}


def restrictions(plan: StepPlan) -> dict[str, Ints]:
    """Which rows that sample may not sample everything: suppress and mask_places, [S] each, where there are any."""
    parts: dict[str, Ints] = {}
    if plan.is_unconstrained_decode:
        return parts
    suppress = np.array([r.suppress_ends for r in plan.rows if r.samples], dtype=np.int32)
    if suppress.any():
        parts["suppress"] = suppress
    if plan.needs_mask:
        masked = np.array([r.constrained for r in plan.rows if r.samples], dtype=np.int32)
        parts["mask_places"] = np.cumsum(masked, dtype=np.int32) * masked
    return parts


def lay_out(parts: dict[str, Ints], out: Ints, sample_rows: Ints, longest: int) -> Packed:
    """Writes the fields into `out`, in order."""
    fields: dict[str, tuple[int, int]] = {}
    placed: dict[int, tuple[int, int]] = {}
    offset = 0
    for name, part in parts.items():
        place = placed.get(id(part))
        if place is None:
            place = placed[id(part)] = (offset, len(part))
            out[offset : offset + len(part)] = part
            offset += len(part)
        fields[name] = place
    return Packed(fields, offset, sample_rows, longest)


def pack_targets(plan: StepPlan, first: Ints, parts: dict[str, Ints]) -> None:
    """Adds the scored positions and the tokens that follow them. first: [B], each row's place among the T positions."""
    targets = [np.frombuffer(r.targets, dtype=np.int32) for r in plan.rows]
    places = [np.arange(len(ids), dtype=np.int32) + at for ids, at in zip(targets, first, strict=True)]
    parts["targets"] = np.concatenate(targets)
    parts["sample_index"] = np.concatenate([parts["sample_index"], *places])


def uploads(plan: StepPlan, max_len: int) -> dict[str, Ints]:
    """Tokens that the device does not know yet, and their places in the flat token table."""
    fresh = [
        (r.row * max_len + r.start - r.skipped, np.frombuffer(r.tokens, np.int32))
        for r in plan.updated_rows
        if r.tokens
    ]
    if not fresh:
        return {}
    places = [np.arange(first, first + len(tokens), dtype=np.int32) for first, tokens in fresh]
    return {"upload_index": np.concatenate(places), "upload_tokens": np.concatenate([tokens for _, tokens in fresh])}


def new_pages(plan: StepPlan, pages_per_row: int) -> dict[str, Ints]:
    """Pages that the device does not know yet, and their places in the flat page table."""
    places: list[int] = []
    pages: list[int] = []
    for r in plan.updated_rows:
        first = r.row * pages_per_row + r.first_page
        places += range(first, first + len(r.new_pages))
        pages += r.new_pages
    return {"page_index": np.array(places, np.int32), "pages": np.array(pages, np.int32)} if pages else {}


def pack_admissions(admitted: tuple[NewSequence, ...], parts: dict[str, Ints]) -> None:
    """Add the sampling parameters of admitted rows; control has checked that they fit."""
    ints, floats = array("I"), array("f")
    bias_index: list[int] = []
    bias_ids: list[int] = []
    biases: list[float] = []
    suppress_index: list[int] = []
    suppressed: list[int] = []
    for a in admitted:
        p = a.params
        assert len(p.logit_bias_ids) <= 4 * MAX_LOGIT_BIAS and len(a.end_ids) <= MAX_SUPPRESSED, (
            f"{len(p.logit_bias_ids) // 4} biases and {len(a.end_ids)} end ids, at most {MAX_LOGIT_BIAS} and "
            f"{MAX_SUPPRESSED}: the next row's would be overwritten"
        )
        ints.extend((a.row, a.prompt_len, p.top_k, p.choice, p.seed & 0xFFFF_FFFF, p.seed >> 32))
        floats.extend((p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty))
        ids = unpack_ids(p.logit_bias_ids)
        bias_index += range(a.row * MAX_LOGIT_BIAS, a.row * MAX_LOGIT_BIAS + len(ids))
        bias_ids += ids
        biases += unpack_floats(p.logit_bias_values)
        suppress_index += range(a.row * MAX_SUPPRESSED, a.row * MAX_SUPPRESSED + len(a.end_ids))
        suppressed += a.end_ids
    parts["ints"] = np.frombuffer(ints, dtype=np.int32)
    parts["floats"] = np.frombuffer(floats, dtype=np.int32)
    parts["bias_index"] = np.array(bias_index, dtype=np.int32)
    parts["bias_ids"] = np.array(bias_ids, dtype=np.int32)
    parts["biases"] = np.array(biases, dtype=np.float32).view(np.int32)
    parts["suppress_index"] = np.array(suppress_index, dtype=np.int32)
    parts["suppressed"] = np.array(suppressed, dtype=np.int32)
