"""Packing of plans, field by field, against a reference without numpy."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine_core.page_counts import PageColumns
from tandem.engine_core.plan import NewSequence, ScheduledSequence, StepPlan
from tandem.engine_core.runtime.graph_bucket import GraphBucket
from tandem.engine_core.runtime.masks import mask_indices
from tandem.engine_core.runtime.staging import MAX_SUPPRESSED, NEWEST, capacity, pack
from tandem.protocol.codec import pack_floats, pack_ids, unpack_floats, unpack_ids
from tandem.protocol.params import MAX_LOGIT_BIAS, MAX_SEED, MAX_STOP_TOKEN_IDS, SamplingParams

MAX_LEN, PAGES_PER_ROW, ROWS, MAX_PREDICTION = 50, 13, 8, 5
COLUMNS = (PageColumns(0, PAGES_PER_ROW),)
IDS = st.integers(0, 2**31 - 1)
FLOATS = st.floats(0.0, 2.0, width=32)


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    biases = draw(st.dictionaries(IDS, FLOATS, max_size=5))
    return SamplingParams(
        draw(st.integers(1, 9)),
        temperature=draw(FLOATS),
        top_k=draw(st.integers(0, 2**31 - 1)),
        top_p=draw(FLOATS),
        min_p=draw(FLOATS),
        repetition_penalty=draw(FLOATS),
        presence_penalty=draw(FLOATS),
        frequency_penalty=draw(FLOATS),
        seed=draw(st.integers(0, MAX_SEED)),
        choice=draw(st.integers(0, 2**31 - 1)),
        logit_bias_ids=pack_ids(list(biases)),
        logit_bias_values=pack_floats(list(biases.values())),
        min_tokens=draw(st.integers(0, 9)),
    )


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Prompts at their beginning or behind a cached part, chunks in their middle and decoding rows, in any order."""
    numbers = draw(st.lists(st.integers(1, ROWS), min_size=1, max_size=ROWS, unique=True))
    rows, admitted = [], []
    for number in numbers:
        kind = draw(st.sampled_from(["first", "cached", "chunk", "decode", "decode"]))
        start = 0 if kind == "first" else draw(st.integers(1, MAX_LEN - 10))
        length = 1 if kind == "decode" else draw(st.integers(1, 9))
        skipped = draw(st.integers(1, start)) if kind == "cached" else 0
        ids = draw(st.lists(IDS, min_size=length + skipped, max_size=length + skipped))
        rows.append(
            ScheduledSequence(
                100 + number,
                number,
                start,
                length,
                samples=kind == "decode" or draw(st.booleans()),
                constrained=draw(st.integers(0, 3)) == 0,
                tokens=b"" if kind == "decode" else pack_ids(ids),
                new_pages=tuple(draw(st.lists(st.integers(1, 99), max_size=PAGES_PER_ROW - 3))),
                first_page=draw(st.integers(0, 3)),
                skipped=skipped,
                prompt_logprob_ids=b"" if kind == "decode" else pack_ids(ids[skipped:][: draw(st.integers(0, length))]),
            )
        )
        if kind in ("first", "cached"):
            ends = tuple(draw(st.lists(IDS, max_size=4)))
            prediction = pack_ids(draw(st.lists(IDS, max_size=MAX_PREDICTION)))
            given = (draw(st.integers(1, 40)), draw(params()), ends)
            admitted.append(NewSequence(100 + number, number, *given, max_drafts=3, prediction=prediction))
    return StepPlan.of(7, tuple(rows), tuple(admitted))


def bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def wide(value: int) -> list[int]:
    """The two words of a 64-bit integer."""
    return [signed(value % 2**32), value >> 32]


WIDE = ("upload_index", "length_rows", "page_index", "ints")
"""Fields of 64-bit integers, each 8-byte aligned."""


def by_hand(plan: StepPlan) -> dict[str, list[int]]:
    fields: dict[str, list[int]] = {name: [] for name in ("token_rows", "positions", "sample_index")}
    fields["sample_rows"] = []
    uploads: dict[str, list[int]] = {"upload_index": [], "upload_tokens": [], "length_rows": [], "lengths": []}
    pages: dict[str, list[int]] = {"page_index": [], "pages": []}
    indices: list[int] = []
    scored: list[int] = []
    targets: list[int] = []
    for row in plan.rows:
        following = unpack_ids(row.prompt_logprob_ids)
        scored += range(len(fields["positions"]), len(fields["positions"]) + len(following))
        targets += following
        for position in range(row.start, row.end):
            fields["token_rows"].append(row.row)
            fields["positions"].append(position if row.length > 1 else NEWEST)
        if row.samples:
            fields["sample_index"].append(len(fields["positions"]) - 1)
            fields["sample_rows"].append(row.row)
            indices.append(1 + max(indices, default=0) if row.constrained else 0)
        for index, token in enumerate(unpack_ids(row.tokens)):
            uploads["upload_index"] += wide(row.row * MAX_LEN + row.start - row.skipped + index)
            uploads["upload_tokens"].append(token)
        if row.tokens:
            uploads["length_rows"] += wide(row.row)
            uploads["lengths"].append(row.end)
        for index, page in enumerate(row.new_pages):
            pages["page_index"] += wide(row.row * PAGES_PER_ROW + row.first_page + index)
            pages["pages"].append(page)
    if targets:
        fields |= {"score_index": scored, "prompt_logprob_ids": targets}
    if any(indices):
        fields["mask_index"] = indices
    for news in (uploads, pages):
        if any(news.values()):
            fields |= news
    return fields | (admissions_by_hand(plan) if plan.admitted else {})


def admissions_by_hand(plan: StepPlan) -> dict[str, list[int]]:
    names = ("ints", "floats", "suppressed", "bias_index", "bias_ids", "biases", "predictions")
    fields: dict[str, list[int]] = {name: [] for name in names}
    for a in plan.admitted:
        p = a.params
        for value in (
            a.row,
            a.prompt_len,
            a.prompt_len + p.max_tokens,
            p.min_tokens,
            p.choice,
            p.seed,
            a.max_drafts,
            len(unpack_ids(a.prediction)),
            a.adapter_slot,
            p.top_k,
        ):
            fields["ints"] += wide(value)
        floats = (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
        fields["floats"] += [bits(value) for value in floats]
        for index, (token, value) in enumerate(
            zip(unpack_ids(p.logit_bias_ids), unpack_floats(p.logit_bias_values), strict=True)
        ):
            fields["bias_index"].append(a.row * MAX_LOGIT_BIAS + index)
            fields["bias_ids"].append(token)
            fields["biases"].append(bits(value))
        fields["suppressed"] += [*a.end_ids, *[-1] * (MAX_SUPPRESSED - len(a.end_ids))]
        fields["predictions"] += unpack_ids(a.prediction)
    return {name: words for name, words in fields.items() if words}


@settings(deadline=None, max_examples=80, print_blob=True)
@given(plans())
def test_every_field_of_an_eager_step_equals_the_reference(plan: StepPlan) -> None:
    words = capacity(ROWS, 9 * ROWS, ROWS * PAGES_PER_ROW, ROWS * MAX_LEN, MAX_PREDICTION)
    out = np.full(words, -77, dtype=np.int32)
    packed = pack(plan, MAX_LEN, COLUMNS, out)
    found = {name: out[start : start + length].tolist() for name, (start, length) in packed.fields.items()}
    assert found == by_hand(plan)
    assert (out[packed.total :] == -77).all(), "nothing is written past the end"
    indices = {index for index in packed.fields.values() if index[1]}
    gaps = packed.total - sum(length for _, length in indices)
    assert gaps <= sum(name in found for name in WIDE), "the fields fill it without a gap, but before 64-bit integers"
    assert not any(packed.fields.get(name, (0, 0))[0] % 2 for name in WIDE)
    assert packed.sample_rows.tolist() == found["sample_rows"]
    assert packed.sample_positions.tolist() == [row.end - 1 for row in plan.rows if row.samples]
    assert packed.longest == max(row.end for row in plan.rows)


@settings(deadline=None, max_examples=60, print_blob=True)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.booleans(), st.lists(st.integers(1, 99), max_size=2)),
        min_size=1,
        max_size=ROWS,
    ),
    st.integers(0, 4),
)
def test_a_decode_step_is_packed_where_its_graph_reads_it(
    drawn: list[tuple[int, bool, list[int]]], padding: int
) -> None:
    rows = [
        ScheduledSequence(
            50 + number, number + 1, start, 1, True, constrained, new_pages=tuple(pages), first_page=number
        )
        for number, (start, constrained, pages) in enumerate(drawn)
    ]
    plan, bucket = StepPlan.of(3, tuple(rows)), len(rows) + padding
    out = np.full(capacity(len(rows), bucket, 2 * len(rows), 0), -77, dtype=np.int32)
    packed = pack(plan, MAX_LEN, COLUMNS, out, GraphBucket(bucket, 0))
    found = {name: out[start : start + length].tolist() for name, (start, length) in packed.fields.items()}
    expected = by_hand(plan)
    assert found["token_rows"] == [row.row for row in rows] + [0] * padding
    assert found["positions"] == [NEWEST] * len(rows) + [0] * padding
    assert packed.sample_positions.tolist() == [row.start for row in rows]
    assert packed.fields["token_rows"] == (0, bucket) and packed.fields["positions"] == (bucket, bucket)
    for name in ("sample_rows", "mask_index", "page_index", "pages"):
        assert found.get(name) == expected.get(name), name
    assert (out[packed.total :] == -77).all()
    assert packed.sample_rows.tolist() == expected["sample_rows"]
    assert packed.longest == max(row.end for row in rows)


def test_indices_of_masks_are_looked_up_by_row() -> None:
    rows = [
        ScheduledSequence(1, 7, 0, 1, True, constrained=True),
        ScheduledSequence(2, 3, 0, 1, True),
        ScheduledSequence(3, 5, 0, 1, False, constrained=True),
    ]
    rows += [ScheduledSequence(4, 2, 0, 1, True, constrained=True)]
    assert mask_indices(StepPlan.of(1, tuple(rows))) == {7: 0, 2: 1}


def worst(rows: int, step_tokens: int, pages: int, uploads: int, prediction: bytes) -> StepPlan:
    """Every row is new, scored, has every bias and end id there can be and a prediction, and pages and cached tokens
    between them."""
    full = SamplingParams(
        1,
        logit_bias_ids=pack_ids([5] * MAX_LOGIT_BIAS),
        logit_bias_values=pack_floats([1.0] * MAX_LOGIT_BIAS),
        stop_token_ids=pack_ids([6] * MAX_STOP_TOKEN_IDS),
    )
    share, rest = divmod(step_tokens, rows)
    made: list[ScheduledSequence] = []
    for number in range(rows):
        length = share + (rest if number == 0 else 0)
        mine, skipped = (tuple(range(pages)), uploads) if number == 0 else ((), 0)
        tokens, targets = pack_ids([1] * (length + skipped)), pack_ids([1] * (length - 1))
        made.append(
            ScheduledSequence(
                number,
                number + 1,
                skipped,
                length,
                True,
                True,
                tokens,
                mine,
                skipped=skipped,
                prompt_logprob_ids=targets,
            )
        )
    given = (9, full, tuple(range(MAX_SUPPRESSED)))
    admitted = [NewSequence(row.seq_id, row.row, *given, prediction=prediction) for row in made]
    return StepPlan.of(1, tuple(made), tuple(admitted))


@settings(deadline=None, max_examples=30, print_blob=True)
@given(st.integers(1, 20), st.integers(0, 60), st.integers(1, 200), st.integers(0, 500))
def test_capacity_is_enough_for_the_worst_step(rows: int, more: int, pages: int, uploads: int) -> None:
    step_tokens = rows + more
    out = np.zeros(capacity(rows, step_tokens, pages, uploads, MAX_PREDICTION), dtype=np.int32)
    plan = worst(rows, step_tokens, pages, uploads, pack_ids([2] * MAX_PREDICTION))
    packed = pack(plan, 10_000, (PageColumns(0, 1000),), out)
    assert packed.total <= len(out)
    fields: dict[str, Any] = packed.fields
    assert fields["suppressed"][1] == rows * MAX_SUPPRESSED
    assert fields["biases"][1] == rows * MAX_LOGIT_BIAS
    assert fields["predictions"][1] == rows * MAX_PREDICTION
    assert fields["pages"][1] == pages
    assert fields["upload_tokens"][1] == step_tokens + uploads


def test_a_decode_step_stores_equal_columns_once() -> None:
    rows = tuple(ScheduledSequence(number, number, 10 + number, 1, True) for number in range(1, 5))
    out = np.zeros(100, dtype=np.int32)
    packed = pack(StepPlan.of(1, rows), MAX_LEN, COLUMNS, out)
    assert packed.total <= 4 * len(rows), "columns with the same content share their offset"


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_longest_row_counts_the_drafts_in_flight_and_those_of_the_step(num_drafts: int) -> None:
    rows = tuple(ScheduledSequence(number, number, 10 * number, 1, True) for number in range(1, 4))
    out = np.zeros(200, dtype=np.int32)
    empty: dict[str, Any] = {"needs_mask": False, "logprobs": -1, "updated_rows": ()}
    plan = StepPlan.decode_only(1, rows, **empty, num_drafts=num_drafts, max_lead=7)
    assert pack(plan, MAX_LEN, COLUMNS, out).longest == 31 + 7 + num_drafts
    prompt = ScheduledSequence(9, 5, 0, 4, True, tokens=pack_ids([1, 2, 3, 4]))
    mixed = StepPlan.decode_only(1, rows, **empty, max_lead=7).followed_by(StepPlan.of(1, (prompt,)))
    assert pack(mixed, MAX_LEN, COLUMNS, out).longest == 31 + 7


def test_new_pages_follow_the_inputs_of_a_decode_graph() -> None:
    """The graph of a decode step reads rows and positions; the uploads of its rows lie behind them."""
    rows = (ScheduledSequence(1, 1, 8, 1, True, new_pages=(7,), first_page=2), ScheduledSequence(2, 2, 30, 1, True))
    plan = StepPlan.of(1, rows)
    assert plan.is_unconstrained_decode
    out = np.zeros(100, dtype=np.int32)
    packed = pack(plan, MAX_LEN, COLUMNS, out, GraphBucket(4, 0))
    assert out[: packed.total].tolist() == [1, 2, 0, 0, NEWEST, NEWEST, 0, 0, PAGES_PER_ROW + 2, 0, 7]
    layout = {"token_rows": (0, 4), "positions": (4, 4), "page_index": (8, 2), "pages": (10, 1)}
    assert packed.fields == layout | {"sample_rows": (0, 2)}
    assert packed.longest == 31


def test_a_decode_step_brings_nothing_more_where_contexts_may_be_longer() -> None:
    plan = StepPlan.of(1, tuple([ScheduledSequence(number, number, 448) for number in range(1, 65)]))
    layouts = []
    for max_len in (4096, 131_072):
        packed = pack(
            plan, max_len, (PageColumns(0, max_len // 16),), np.zeros(1000, dtype=np.int32), GraphBucket(64, 0)
        )
        layouts.append((packed.total, packed.fields, packed.longest))
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize(("rows", "max_len"), [(1024, 131_072), (4096, 2**20)])
def test_offsets_in_the_largest_tables_are_exact(rows: int, max_len: int) -> None:
    """The flat index of the last token may not fit 32 bits."""
    last = ScheduledSequence(
        9, rows, max_len - 2, 2, tokens=pack_ids([5, 6]), new_pages=(3,), first_page=max_len // 16 - 1
    )
    packed = pack(StepPlan.of(1, (last,)), max_len, (PageColumns(0, max_len // 16),), np.zeros(100, dtype=np.int32))
    tokens = packed.read("upload_index").view(np.int64)
    assert tokens.tolist() == [(rows + 1) * max_len - 2, (rows + 1) * max_len - 1]
    assert packed.read("page_index").view(np.int64).tolist() == [(rows + 1) * (max_len // 16) - 1]
