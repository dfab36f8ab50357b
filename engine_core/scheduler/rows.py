"""What the device is told of a sequence."""

from collections.abc import Sequence as Items

from tandem.engine_core.plan import Admission, Row
from tandem.engine_core.sequence import Sequence


def next_row(seq: Sequence, length: int, page_size: int) -> Row:
    """The next `length` positions, with whatever the device needs for them and does not have."""
    start = seq.launched
    end = start + length
    first = min(start, seq.uploaded) if start < seq.uploads else start
    scored = seq.scored and seq.told < seq.prompt_len
    return Row(
        seq.id,
        seq.row,
        start,
        length,
        length == seq.pending,
        suppress_ends=end - seq.prompt_len < seq.min_tokens,
        constrained=seq.constraint is not None,
        tokens=seq.tokens[first : min(end, seq.uploads)].tobytes() if first < seq.uploads else b"",
        new_pages=tuple(seq.pages[seq.mapped : -(-end // page_size)]),
        first_page=seq.mapped,
        skipped=start - first,
        targets=seq.tokens[start + 1 : min(end + 1, seq.prompt_len)].tobytes() if scored else b"",
    )


def paged_row(seq: Sequence, page_size: int) -> Row:
    """The next row of a settled sequence, where it begins with a new page."""
    start, mapped = seq.launched, seq.mapped
    pages = tuple(seq.pages[mapped : start // page_size + 1])
    constrained = seq.constraint is not None
    return Row(seq.id, seq.row, start, 1, True, constrained=constrained, new_pages=pages, first_page=mapped)


def steady_rows(running: Items[Sequence]) -> list[Row]:
    """Of settled sequences, those whose one pending position, at `launched`, lies in a page that the device knows."""
    return [Row(seq.id, seq.row, seq.launched, 1, True) for seq in running if seq.launched < seq.steady_until]


def steady_rows_some_constrained(running: Items[Sequence]) -> list[Row]:
    """The same where some follow a grammar: a second loop, so that the first need not look."""
    return [
        Row(seq.id, seq.row, seq.launched, 1, True, False, seq.constraint is not None)
        for seq in running
        if seq.launched < seq.steady_until
    ]


def admission_of(seq: Sequence) -> Admission:
    """What goes before its first row."""
    return Admission(
        seq.id,
        seq.row,
        seq.prompt_len,
        seq.params,
        tuple(seq.end_ids) if seq.min_tokens else (),
    )


def within_uploads(candidates: Items[Sequence], takes: list[int], left: int) -> None:
    """Puts off rows whose cached tokens would not fit into the step's upload. The first always fits."""
    for index, seq in enumerate(candidates):
        if takes[index] and seq.launched > seq.uploaded and not seq.settled:
            skipped = seq.launched - seq.uploaded
            if skipped > left:
                takes[index] = 0
            else:
                left -= skipped
