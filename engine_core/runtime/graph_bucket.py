"""Layout of a step's tokens in the inputs of a CUDA graph.

A graph has a fixed number of slots for tokens.
"""

from typing import NamedTuple

from tandem.engine_core.attention.base import Span
from tandem.engine_core.plan import StepPlan


class GraphBucket(NamedTuple):
    """Sizes of a graph's inputs, in slots for tokens.

    A slot for each row of a single token comes first, then slots for the tokens of longer rows. Slots that a step
    leaves free are padding: row 0, position 0, page 0.
    """

    num_decode_tokens: int
    num_prefill_tokens: int


def exact_bucket(plan: StepPlan) -> GraphBucket:
    """Return the bucket that a plan fills to the last slot."""
    decode_tokens = plan.num_steady + sum([row.length == 1 for row in plan.other_rows])
    return GraphBucket(decode_tokens, plan.total_tokens - decode_tokens)


def long_spans(plan: StepPlan) -> list[Span]:
    """Return the spans of the rows of several tokens, in order.

    Their offsets count from the first slot for the tokens of such rows.
    """
    spans = []
    offset = 0
    for row in plan.other_rows:
        if row.length > 1:
            spans.append(Span(row.row, offset, row.start, row.length))
            offset += row.length
    return spans
