"""Classes of KV groups by window."""

import pytest

from tandem.engine_core.kv_cache.page_classes import ClassPages, PageClass, PageCounts, page_classes


@pytest.mark.parametrize(
    ("windows", "classes"),
    [
        ((None,), (PageClass((0,)),)),
        ((None, None), (PageClass((0, 1)),)),
        ((None, 1024, 1024), (PageClass((0,)), PageClass((1, 2), 64))),
        ((1024,), (PageClass(()), PageClass((0,), 64))),
        ((None, 512, 4096), (PageClass((0,)), PageClass((2,), 256), PageClass((1,), 32))),
    ],
)
def test_groups_with_equal_windows_form_a_class(
    windows: tuple[int | None, ...], classes: tuple[PageClass, ...]
) -> None:
    assert page_classes(windows, 16) == classes


@pytest.mark.parametrize(("window", "tail"), [(1, 0), (2, 1), (16, 1), (17, 1), (18, 2), (33, 2), (34, 3), (1024, 64)])
def test_tail_holds_the_positions_that_the_next_one_sees_before_itself(window: int, tail: int) -> None:
    assert page_classes((None, window), 16)[1].tail == tail


def test_audit_sees_what_is_broken() -> None:
    counts = PageCounts()
    pages = ClassPages(PageClass((0,), 1), counts)
    pages.add_node()
    assert pages.attach([1], [[5]]) == []
    assert pages.attach([1], [[6]]) == [0]
    assert (pages.pages(1), list(pages.loose), pages.audit()) == ([5], [1], [])
    pages.loose.clear()
    (problem,) = pages.audit()
    assert "[]" in problem
    pages.protect(1)
    assert pages.audit() == []
    assert (pages.count(), (counts.held, counts.evictable)) == ((1, 0, 0), (1, 1))
