"""What sequences put into a plan."""

from collections.abc import Iterable

from engine_core.plan import Admission, Row
from engine_core.scheduler.sequence import Sequence


def row_of(seq: Sequence, length: int, pending: int) -> Row:
    """The next `length` positions of a sequence, of `pending` that could be computed, with its news for the device."""
    start = seq.launched
    end = start + length
    return Row(
        seq.id,
        seq.row,
        start,
        length,
        length == pending,
        suppress_ends=end - seq.prompt_len < seq.min_tokens,
        constrained=seq.constraint is not None,
        tokens=seq.tokens[start : min(end, seq.uploads)].tobytes() if start < seq.uploads else b"",
        new_pages=tuple(seq.pages[seq.mapped :]),
        first_page=seq.mapped,
        targets=seq.tokens[start + 1 : min(end + 1, seq.prompt_len)].tobytes() if seq.scored else b"",
    )


def admission_of(seq: Sequence) -> Admission:
    """What goes ahead of the first row of a sequence."""
    return Admission(
        seq.id,
        seq.row,
        seq.prompt_len,
        seq.params,
        tuple(seq.end_ids) if seq.min_tokens else (),
    )


def steady_rows(settled: Iterable[Sequence]) -> tuple[Row, ...]:
    """Of settled sequences each has one position pending, at `launched`, unless it has reached its length."""
    return tuple([Row(seq.id, seq.row, seq.launched, 1, True) for seq in settled if seq.launched + 1 < seq.total_len])


def steady_rows_some_constrained(settled: Iterable[Sequence]) -> tuple[Row, ...]:
    """The same where some follow a grammar: a second loop, so that the first need not look."""
    return tuple(
        [
            Row(seq.id, seq.row, seq.launched, 1, True, False, seq.constraint is not None)
            for seq in settled
            if seq.launched + 1 < seq.total_len
        ]
    )
