"""Slots of positions in pages of a pool."""

import pytest
import torch

from tandem.engine_core.kernels.page_table import PageTable


def table(page_size: int = 4, page_stride: int = 10) -> PageTable:
    pages = torch.tensor([[0, 0, 0], [5, 2, 9], [2**30, 1, 7]], dtype=torch.int32)
    return PageTable(pages, page_size, page_stride)


def test_slots_follow_the_pages_of_a_row() -> None:
    """The first and last position of a page, and one of a far page: its slot exceeds 32 bits."""
    rows, positions = torch.tensor([1, 1, 1, 1, 0, 2]), torch.tensor([0, 3, 4, 11, 7, 1])
    assert table().slots(rows, positions).tolist() == [50, 53, 20, 93, 3, 10 * 2**30 + 1]


@pytest.mark.parametrize(("first", "end"), [(0, 0), (0, 1), (0, 4), (0, 5), (0, 12), (3, 5), (4, 8), (7, 12), (11, 12)])
def test_slots_between_two_positions_are_those_of_each(first: int, end: int) -> None:
    found = table().slots_between([2, 1], first, end)
    positions = torch.arange(first, end).expand(2, -1)
    assert torch.equal(found, table().slots(torch.tensor([[2], [1]]).expand(2, end - first), positions))


def test_columns_of_a_ring_repeat() -> None:
    """The page with index p is in columns p % 3 and 3 + p % 3: pages 4, 5 and 6 in columns 1 to 3."""
    pages = torch.tensor([[0] * 6, [9, 7, 8] * 2], dtype=torch.int32)
    ring = PageTable(pages, 4, 10, window=7, ring=3)
    positions = torch.arange(16, 28)
    expected = [page * 10 + offset for page in (7, 8, 9) for offset in range(4)]
    assert ring.slots(torch.ones_like(positions), positions).tolist() == expected
    assert ring.slots_between([1], 16, 28).tolist() == [expected]
    assert ring.flat[6 + ring.column(4) :][:3].tolist() == [7, 8, 9]
    assert [ring.first_page(start) for start in (0, 6, 9, 10, 14)] == [0, 0, 0, 1, 2]


def test_the_flat_view_of_a_group_begins_at_its_first_column() -> None:
    pages = torch.arange(15, dtype=torch.int32).view(3, 5)
    own = PageTable(pages[:, 2:4], 4, 10)
    assert own.flat.tolist() == list(range(2, 14))
    assert [own.flat[row * pages.stride(0) + 1].item() for row in range(3)] == [3, 8, 13]


def test_pages_are_views_of_the_slots_that_the_table_names() -> None:
    """Pages of one layer: those of other layers lie between them."""
    paged = table()
    memory = torch.arange(6 * 10 * 2 * 3.0).view(60, 2, 3)
    pages = paged.view_pages(memory[3:57])
    assert pages.shape == (6, 4, 2, 3)
    assert pages.data_ptr() == memory[3].data_ptr()
    slots = paged.slots(torch.tensor([1, 1]), torch.tensor([2, 5]))
    assert torch.equal(memory[3:][slots], torch.stack([pages[5, 2], pages[2, 1]]))


def test_tables_that_kernels_cannot_address_are_refused() -> None:
    table(page_size=1).check()
    table(page_size=64, page_stride=100).check()
    for page_size in (0, -4, 3, 24):
        with pytest.raises(ValueError, match=rf" {page_size} positions.*\bpage size\b"):
            table(page_size=page_size).check()
    with pytest.raises(ValueError, match="repeat"):
        PageTable(torch.zeros(4, 4, dtype=torch.int32), 16, 16, ring=2).check()
    with pytest.raises(ValueError, match="contiguous"):
        PageTable(torch.zeros(4, 4, dtype=torch.int32).t()[:, ::2], 16, 16).check()
