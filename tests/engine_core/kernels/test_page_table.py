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


@pytest.mark.parametrize("count", [0, 1, 4, 5, 12])
def test_first_slots_are_those_of_the_first_positions(count: int) -> None:
    found = table().first_slots(slice(1, 3), count)
    positions = torch.arange(count).expand(2, -1)
    assert torch.equal(found, table().slots(torch.tensor([[1], [2]]).expand(2, count), positions))


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
        with pytest.raises(ValueError, match=f"pages of {page_size} positions are not supported"):
            table(page_size=page_size).check()
    with pytest.raises(ValueError, match="contiguous"):
        PageTable(torch.zeros(4, 4, dtype=torch.int32).t()[:, ::2], 16, 16).check()
