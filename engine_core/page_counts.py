"""Numbers of KV pages that sequences hold, by the windows of the KV groups.

A sequence has a page of each group for every `page_size` positions. Of a group with a window it keeps only the pages in
that window.
"""

from collections.abc import Sequence

from msgspec import Struct

from tandem.engine_core.integers import ceil_div

Windows = Sequence[int | None]
"""Window of each group; None for a group that keeps all positions."""


class PageColumns(Struct, frozen=True):
    """Columns of one group in the rows of the device's page table.

    The page with index p of a row (of positions p * page_size and following) is in column first + p. If `ring` is not
    0, it is in columns first + p % ring and first + ring + p % ring instead: a later page replaces it, and any `ring`
    consecutive pages are in consecutive columns, from that of the lowest on.
    """

    first: int
    count: int
    """Number of columns."""
    ring: int = 0
    """Number of pages that are kept; 0: all of a row's pages are."""

    @property
    def pages(self) -> int:
        """Maximum number of a row's pages that a step reads."""
        return self.ring or self.count


def page_columns(windows: Windows, page_size: int, max_len: int, chunk: int) -> tuple[PageColumns, ...]:
    """Return the columns of all groups, one after the other.

    The table of a group with a window has room for the pages that one step reads. chunk: maximum positions of a row in
    a step.
    """
    columns: list[PageColumns] = []
    first, pages = 0, ceil_div(max_len, page_size)
    for window in windows:
        ring = pages if window is None else ceil_div(window + min(chunk, max_len), page_size) + 2
        own = PageColumns(first, 2 * ring, ring) if 2 * ring < pages else PageColumns(first, pages)
        columns.append(own)
        first += own.count
    return tuple(columns)


def held_pages(windows: Windows, positions: int, page_size: int, max_lead: int = 0) -> int:
    """Return the maximum number of pages of a decoding sequence of this many positions.

    With as many a prompt of this length can be computed too, in chunks of a page. Of a group with a window they are
    those that a match at the last full page needs, and those of the next row: it begins in the page behind them, as
    known tokens are at most one step behind it. max_lead: positions beyond the host's count that a row may compute.
    """
    pages = ceil_div(positions, page_size)
    lead = ceil_div(max_lead, page_size)
    kept = [None if window is None else ceil_div(window - 1, page_size) + 1 + lead for window in windows]
    return sum(pages if count is None else min(pages, count) for count in kept)


def tokens_of_pages(windows: Windows, pages: int, page_size: int, max_len: int, max_lead: int = 0) -> int:
    """Return the tokens of sequences of `max_len`, and a shorter one in the rest, that this many pages hold.

    max_lead: as in `held_pages`.
    """

    def held(tokens: int) -> int:
        return held_pages(windows, tokens, page_size, max_lead)

    longest = ceil_div(max_len, page_size) * page_size
    count, left = divmod(pages, held(longest))
    low, high = 0, longest // page_size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if held(middle * page_size) <= left else (low, middle - 1)
    return count * longest + low * page_size
