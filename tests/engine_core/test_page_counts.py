"""Numbers of pages by length and window."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.engine_core.page_counts import PageColumns, held_pages, page_columns, tokens_of_pages

GEMMA_3_4B = (None, *[1024] * 6)
WINDOWS = st.lists(st.sampled_from([None, 1, 7, 16, 40]), min_size=1, max_size=4)


def test_one_group_has_a_column_for_each_page_of_a_row() -> None:
    assert page_columns((None,), 16, 100, 8192) == (PageColumns(0, 7),)


def test_the_table_of_a_window_group_is_sized_by_window_and_chunk() -> None:
    assert page_columns((None, 64, 64), 16, 4096, 128) == (
        PageColumns(0, 256),
        PageColumns(256, 28, 14),
        PageColumns(284, 28, 14),
    )
    assert page_columns((None, 64), 16, 400, 128)[1] == PageColumns(25, 25), "a ring would take more columns"
    assert page_columns((64,), 16, 4096, 1 << 20)[0] == PageColumns(0, 256), "one step reads all pages"


@given(
    window=st.integers(1, 70),
    page_size=st.sampled_from([1, 4, 16]),
    chunk=st.integers(1, 60),
    start=st.integers(0, 300),
    length=st.integers(1, 60),
)
def test_the_pages_that_a_step_reads_fit_the_ring(
    window: int, page_size: int, chunk: int, start: int, length: int
) -> None:
    (columns,) = page_columns((window,), page_size, 400, chunk)
    first, end = max(0, start + 1 - window) // page_size, -(-(start + min(length, chunk)) // page_size)
    assert end - first < (columns.ring or columns.count + 1)


def test_a_long_sequence_holds_the_pages_of_its_windows() -> None:
    assert held_pages(GEMMA_3_4B, 512, 16) == 7 * 32
    assert held_pages(GEMMA_3_4B, 32_768, 16) == 2048 + 6 * 65
    assert held_pages((None,), 0, 16) == 0


@given(window=st.integers(1, 70), page_size=st.sampled_from([1, 4, 16]), positions=st.integers(1, 300))
def test_a_decoding_sequence_never_holds_more(window: int, page_size: int, positions: int) -> None:
    """It holds the pages of the window of its last position and that of the next."""
    held = {position // page_size for position in range(max(0, positions - window + 1), positions + 1)}
    assert len(held) <= held_pages((window,), positions + page_size, page_size)


def test_tokens_of_one_group_are_those_of_its_pages() -> None:
    for pages in range(30):
        assert tokens_of_pages((None,), pages, 16, 100) == pages * 16


@given(windows=WINDOWS, pages=st.integers(0, 500), page_size=st.sampled_from([1, 4, 16]), max_len=st.integers(1, 200))
def test_tokens_are_the_most_that_the_pages_hold(
    windows: list[int | None], pages: int, page_size: int, max_len: int
) -> None:
    longest = -(-max_len // page_size) * page_size

    def needed(tokens: int) -> int:
        count, rest = divmod(tokens, longest)
        return count * held_pages(windows, longest, page_size) + held_pages(windows, rest, page_size)

    tokens = tokens_of_pages(windows, pages, page_size, max_len)
    assert needed(tokens) <= pages < needed(tokens + page_size)


def test_gemma_3_4b_holds_five_times_the_tokens_at_32768_positions() -> None:
    """In the memory of 1,000 pages of all 34 layers, a page holds 5; short sequences lose little."""
    pages = 1000 * 34 // 5
    assert tokens_of_pages(GEMMA_3_4B, pages, 16, 32_768) >= 5 * 1000 * 16
    assert tokens_of_pages(GEMMA_3_4B, pages, 16, 512) >= 0.95 * 1000 * 16
