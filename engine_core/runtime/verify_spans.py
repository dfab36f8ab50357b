"""The spans of rows with several tokens, of which some may be missing, for attention that is planned on the host."""

from dataclasses import replace

from tandem.engine_core.attention.base import Span
from tandem.engine_core.kernels.speculation.reference import VerifyTokens


def verify_spans(tokens: VerifyTokens, queries: int) -> list[Span]:
    """Return the spans of rows of `queries` tokens each; a token that repeats a position has one of its own."""
    spans: list[Span] = []
    rows, positions = tokens.rows.tolist(), tokens.positions.tolist()
    for offset, (row, position) in enumerate(zip(rows, positions, strict=True)):
        if offset % queries and position == positions[offset - 1] + 1:
            spans[-1] = replace(spans[-1], length=spans[-1].length + 1)
        else:
            spans.append(Span(row, offset, position, 1))
    return spans
