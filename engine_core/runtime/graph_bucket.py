"""How the tokens of a step lie in the inputs of a CUDA graph, which has a place for so many and no other number."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tandem.engine_core.attention.base import Span
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.staging import (
    Ints,
    Packed,
    lay_out,
    new_pages,
    pack_admissions,
    pack_targets,
    restrictions,
    uploads,
)


class GraphBucket(NamedTuple):
    """First a place for each row of a single token, then places for the tokens of longer rows.

    What a step leaves free is padding: row 0, position 0, page 0.
    """

    singles: int
    tokens: int


def exact_bucket(plan: StepPlan) -> GraphBucket:
    """The shape that a plan fills to the last place."""
    singles = sum([row.length == 1 for row in plan.rows])
    return GraphBucket(singles, plan.total_tokens - singles)


def pack_padded(plan: StepPlan, shape: GraphBucket, max_len: int, pages_per_row: int, out: Ints) -> Packed:
    """Writes a plan into `out` for a graph of this shape, which the plan has to fit.

    Fields as in `staging.pack`, but token_rows and positions come first, as long as the shape has places.
    """
    row, start, length, samples = _columns(plan)
    single = length == 1
    several = ~single
    first = _first_places(single, length, shape)
    token_rows, positions = np.zeros((2, shape.singles + shape.tokens), dtype=np.int32)
    token_rows[first[single]], positions[first[single]] = row[single], start[single]
    lengths = length[several]
    used = slice(shape.singles, shape.singles + int(lengths.sum()))
    token_rows[used] = np.repeat(row[several], lengths)
    positions[used] = np.arange(used.start, used.stop, dtype=np.int32)
    positions[used] -= np.repeat(first[several] - start[several], lengths)
    end = start + length
    parts = {"token_rows": token_rows, "positions": positions}
    parts |= {"sample_index": (first + length - 1)[samples], "sample_rows": row[samples]}
    parts |= {"sample_positions": end[samples]} | restrictions(plan)
    if any(r.targets for r in plan.rows):
        pack_targets(plan, first, parts)
    parts |= uploads(plan, max_len) | new_pages(plan, pages_per_row)
    if plan.admitted:
        pack_admissions(plan.admitted, parts)
    return lay_out(parts, out, parts["sample_rows"], int(end.max()))


def long_spans(plan: StepPlan) -> list[Span]:
    """The rows of several tokens, in order; offsets count from the first of their places."""
    spans = []
    offset = 0
    for row in plan.rows:
        if row.length > 1:
            spans.append(Span(row.row, offset, row.start, row.length))
            offset += row.length
    return spans


def _columns(plan: StepPlan) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
    return (
        np.array([r.row for r in plan.rows], dtype=np.int32),
        np.array([r.start for r in plan.rows], dtype=np.int32),
        np.array([r.length for r in plan.rows], dtype=np.int32),
        np.array([r.samples for r in plan.rows], dtype=bool),
    )


def _first_places(single: NDArray[np.bool_], length: Ints, shape: GraphBucket) -> Ints:
    """Where each row's first token lies."""
    before = np.cumsum(np.where(single, 0, length), dtype=np.int32) - length
    return np.where(single, np.cumsum(single, dtype=np.int32) - 1, shape.singles + before)
