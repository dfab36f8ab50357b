"""Layouts of graph inputs, against what the eager path packs for the same plan."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine_core.attention.base import Span
from tandem.engine_core.plan import ScheduledSequence, StepPlan
from tandem.engine_core.runtime.graph_bucket import GraphBucket, exact_bucket, long_spans
from tandem.engine_core.runtime.graphs import MAX_PROMPTS, StepGraphs, max_samples
from tandem.engine_core.runtime.staging import NEWEST, Packed, capacity, pack
from tests.engine_core.runtime.test_staging import COLUMNS, MAX_LEN, PAGES_PER_ROW, ROWS, plans

LAYOUT = {"token_rows", "positions", "sample_index", "score_index"}
"""Fields that depend on the layout; all others are the same in every one."""


def fields(packed: Packed, out: np.ndarray) -> dict[str, list[int]]:
    return {name: out[start : start + length].tolist() for name, (start, length) in packed.fields.items()}


@settings(deadline=None, max_examples=80, print_blob=True)
@given(plans(), st.integers(0, 3), st.integers(0, 5), st.integers(0, 3))
def test_every_token_is_packed_into_its_slot_of_the_bucket(
    plan: StepPlan, free_rows: int, free_tokens: int, free_samples: int
) -> None:
    tight = exact_bucket(plan)
    bucket = GraphBucket(tight.num_decode_tokens + free_rows, tight.num_prefill_tokens + free_tokens)
    out = np.full(capacity(ROWS + 3, 9 * ROWS + 5, ROWS * PAGES_PER_ROW, ROWS * MAX_LEN), -77, dtype=np.int32)
    eager = fields(pack(plan, MAX_LEN, COLUMNS, out), out)
    samples = sum(row.samples for row in plan.rows)
    packed = pack(
        plan,
        MAX_LEN,
        COLUMNS,
        out,
        bucket,
        samples + free_samples if bucket.num_prefill_tokens else 0,
    )
    found = fields(packed, out)
    assert {name: found[name] for name in found.keys() - LAYOUT} == {
        name: eager[name] for name in eager.keys() - LAYOUT
    }
    total = sum(bucket)
    assert packed.fields["token_rows"] == (0, total) and packed.fields["positions"] == (total, total)
    tokens = list(zip(found["token_rows"], found["positions"], strict=True))
    singles = [(row.row, NEWEST) for row in plan.rows if row.length == 1]
    longer = [(row.row, position) for row in plan.rows if row.length > 1 for position in range(row.start, row.end)]
    assert tokens[: bucket.num_decode_tokens] == singles + [(0, 0)] * free_rows
    assert tokens[bucket.num_decode_tokens :] == longer + [(0, 0)] * free_tokens
    in_order = list(zip(eager["token_rows"], eager["positions"], strict=True))
    # In a decode step token i is sample i, and its graph needs no indices.
    indices = found.get("sample_index", range(len(plan.rows)))
    assert [tokens[index] for index in indices[:samples]] == [in_order[index] for index in eager["sample_index"]]
    assert list(indices[samples:]) == [-1] * (free_samples if bucket.num_prefill_tokens else 0)
    assert [tokens[index] for index in found.get("score_index", [])] == [
        in_order[index] for index in eager.get("score_index", [])
    ]
    if bucket.num_prefill_tokens:
        assert packed.fields["sample_index"] == (2 * total, samples + free_samples), "where the graph reads it"
    spans = long_spans(plan)
    assert [(span.row, span.start, span.length) for span in spans] == [
        (row.row, row.start, row.length) for row in plan.rows if row.length > 1
    ]
    for span in spans:
        assert tokens[bucket.num_decode_tokens + span.offset] == (span.row, span.start)


def decode(count: int, samples: bool = True) -> list[ScheduledSequence]:
    return [ScheduledSequence(number, number, 10 + number, 1, samples) for number in range(1, count + 1)]


def prompt(number: int, length: int) -> ScheduledSequence:
    return ScheduledSequence(number, number, 0, length, True, tokens=b"\0\0\0\0" * length)


def plan_of(rows: list[ScheduledSequence]) -> StepPlan:
    return StepPlan.of(1, tuple(rows))


GRAPHS = StepGraphs((1, 2, 4), {16: (0, 2, 8), 64: (0, 2, 8), 256: (0,)}, [], [], [])


@pytest.mark.parametrize(
    ("rows", "bucket"),
    [
        (decode(1), GraphBucket(1, 0)),
        (decode(3), GraphBucket(4, 0)),
        (decode(5), None),
        ([*decode(2), ScheduledSequence(9, 9, 32, 1, True, new_pages=(4,), first_page=2)], GraphBucket(4, 0)),
        ([*decode(2), ScheduledSequence(9, 9, 3, 1, True, constrained=True)], GraphBucket(4, 0)),
        ([*decode(2), ScheduledSequence(9, 9, 3, 1, True, prompt_logprob_ids=b"\0\0\0\0")], None),
        (decode(2, samples=False), None),
        ([prompt(1, 2)], GraphBucket(0, 16)),
        ([prompt(1, 17)], GraphBucket(0, 64)),
        ([prompt(1, 64)], GraphBucket(0, 64)),
        ([prompt(1, 65)], GraphBucket(0, 256)),
        ([*decode(1), prompt(9, 65)], None),
        ([prompt(1, 257)], None),
        ([*decode(1), prompt(9, 16)], GraphBucket(2, 16)),
        ([*decode(8), prompt(9, 10), prompt(10, 7)], GraphBucket(8, 64)),
        ([*decode(9), prompt(10, 10)], None),
        ([prompt(number, 2) for number in range(1, 33)], GraphBucket(0, 64)),
    ],
)
def test_a_step_takes_the_smallest_bucket_that_fits(rows: list[ScheduledSequence], bucket: GraphBucket | None) -> None:
    assert GRAPHS.bucket(plan_of(rows)) == bucket


def test_a_step_takes_a_larger_bucket_that_is_faster() -> None:
    graphs = StepGraphs((1, 2, 4), {16: (0, 2, 8)}, [], [], [])
    graphs.prefer({GraphBucket(2, 0): GraphBucket(4, 0), GraphBucket(0, 16): GraphBucket(8, 16)})
    assert graphs.bucket(plan_of([prompt(1, 5)])) == GraphBucket(8, 16)
    assert graphs.bucket(plan_of([prompt(1, 17)])) is None
    rows = [ScheduledSequence(number, number, 9) for number in (1, 2)]
    assert graphs.bucket(plan_of(rows[:1])) == GraphBucket(1, 0)
    assert graphs.bucket(plan_of(rows)) == GraphBucket(4, 0)


@pytest.mark.parametrize(
    ("bucket", "capacity"),
    [
        (GraphBucket(0, 2), 1),
        (GraphBucket(0, 16), 8),
        (GraphBucket(2, 16), 16),
        (GraphBucket(8, 64), 64),
        (GraphBucket(0, 4096), 64),
        (GraphBucket(8, 4096), 72),
        (GraphBucket(32, 4096), 80),
    ],
)
def test_sample_capacity_holds_all_samples_of_a_step_and_a_bucket_of_sampling(
    bucket: GraphBucket, capacity: int
) -> None:
    """Of at most 80 rows; up to 64 samples are captured."""
    assert max_samples(bucket, (1, 2, 4, 8, 16, 32, 64), max_rows=80) == capacity


def test_a_step_of_more_prompts_than_a_graph_holds_takes_no_bucket() -> None:
    graphs = StepGraphs((1,), {1024: (0,)}, [], [], [])
    assert graphs.bucket(plan_of([prompt(number, 2) for number in range(1, MAX_PROMPTS + 1)])) == GraphBucket(0, 1024)
    assert graphs.bucket(plan_of([prompt(number, 2) for number in range(1, MAX_PROMPTS + 2)])) is None


def test_a_decode_step_packs_alike_with_and_without_a_restricted_row() -> None:
    """The bucket's inputs come first, whichever way the other fields are made."""
    rows = decode(3)
    plan, other_plan = plan_of(rows), plan_of([*rows[:2], ScheduledSequence(3, 3, 13, 1, True, tokens=b"\0\0\0\0")])
    assert plan.is_unconstrained_decode and not other_plan.is_decode_only
    out, other = np.full(50, -77, dtype=np.int32), np.full(50, -77, dtype=np.int32)
    packed = pack(plan, MAX_LEN, COLUMNS, out, GraphBucket(4, 0))
    general = pack(other_plan, MAX_LEN, COLUMNS, other, GraphBucket(4, 0))
    assert out[:8].tolist() == other[:8].tolist() == [1, 2, 3, 0, NEWEST, NEWEST, NEWEST, 0]
    assert packed.sample_rows.tolist() == general.sample_rows.tolist()
    assert packed.longest == general.longest == 14


def test_long_spans_count_from_the_first_long_row() -> None:
    plan = plan_of([prompt(1, 3), *decode(2), prompt(9, 5)])
    assert long_spans(plan) == [Span(1, 0, 0, 3), Span(9, 3, 0, 5)]
