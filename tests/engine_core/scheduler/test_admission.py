"""Gates: all or nothing, and everything back."""

from array import array
from collections.abc import Callable

import pytest

from engine_core.kv_cache.pages import PageAllocator
from engine_core.scheduler.admission import PADDING_ROW, PageGate, RowGate, admit
from engine_core.scheduler.sequence import Sequence
from protocol.params import SamplingParams


def new(seq_id: int, prompt: int = 5, max_tokens: int = 4) -> Sequence:
    return Sequence(seq_id, b"c", seq_id, array("i", range(prompt)), SamplingParams(max_tokens), frozenset())


class Closed:
    def acquire(self, seq: Sequence) -> Callable[[], None] | None:
        return None


def test_a_gate_that_declines_gives_back_what_others_gave() -> None:
    rows, pages = RowGate(2), PageGate(PageAllocator(10), 4)
    seq = new(1)
    assert not admit(seq, (rows, pages, Closed()))
    assert (rows.free, pages.pages.free, seq.row, seq.pages) == (2, 9, -1, [])


def test_leases_give_everything_back_once() -> None:
    rows, pages = RowGate(2), PageGate(PageAllocator(10), 4)
    seq = new(1)
    assert admit(seq, (rows, pages))
    assert seq.row != PADDING_ROW
    assert (rows.free, pages.pages.free, len(seq.pages)) == (1, 6, 3)
    seq.leases.close()
    assert (rows.free, pages.pages.free, seq.row, seq.pages) == (2, 9, -1, [])
    seq.leases.close()
    assert (rows.free, pages.pages.free) == (2, 9)


def test_rows_run_out() -> None:
    rows = RowGate(2)
    first, second, third = new(1), new(2), new(3)
    assert admit(first, (rows,))
    assert admit(second, (rows,))
    assert not admit(third, (rows,))
    assert {first.row, second.row} == {1, 2}
    first.leases.close()
    assert admit(third, (rows,))


def test_a_row_freed_twice_is_found() -> None:
    rows = RowGate(1)
    seq = new(1)
    release = rows.acquire(seq)
    assert release is not None
    release()
    seq.row = 1
    with pytest.raises(AssertionError, match="row 1 freed twice"):
        release()


@pytest.mark.parametrize(("prompt", "max_tokens", "pages"), [(1, 1, 1), (3, 1, 1), (3, 2, 2), (8, 8, 4), (9, 8, 5)])
def test_pages_cover_prompt_and_output(prompt: int, max_tokens: int, pages: int) -> None:
    gate = PageGate(PageAllocator(10), 4)
    seq = new(1, prompt, max_tokens)
    assert gate.acquire(seq) is not None
    assert len(seq.pages) == pages
