"""The Triton gather of a step's inputs against its oracle: integers, so they must be equal."""

import pytest
import torch

from tandem.engine_core.kernels.attention.decode_inputs import decode_inputs, decode_inputs_reference
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.sampling.inputs import INT_COLUMNS
from tests.support.length_tables import tables_of


@pytest.mark.parametrize("batch", [1, 5, 130])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_stride", [8, 8 * 2 * 28])
def test_gathered_inputs_equal_the_oracle(batch: int, dtype: torch.dtype, page_stride: int, device: str) -> None:
    """Slots of the highest pages exceed 32 bits. Half of the positions refer to the rows' newest tokens."""
    tables = tables_of(torch.randint(0, 1000, (9, 64), dtype=torch.int32, device=device))
    pages = torch.randint(0, 2**30, (9, 8), dtype=torch.int32, device=device)
    rows = torch.randint(0, 9, (batch,), dtype=dtype, device=device)
    positions = torch.randint(-64, 64, (batch,), dtype=dtype, device=device).clamp(min=-1)
    table, again = PageTable(pages, 8, page_stride), positions.clone()
    kept, expected_kept = torch.zeros(2, 2, batch, dtype=torch.int32, device=device)
    found = decode_inputs(tables, [table], rows, positions, (kept[0], kept[1]))
    reference = decode_inputs_reference(tables, [table], rows, again, (expected_kept[0], expected_kept[1]))
    for ours, expected in zip(found, reference, strict=True):
        assert ours.dtype == torch.int64
        assert torch.equal(ours, expected)
    assert torch.equal(positions, again)
    assert torch.equal(kept, expected_kept) and torch.equal(kept[1], positions.int())


def test_a_negative_position_is_that_of_the_rows_newest_token(device: str) -> None:
    tables = tables_of(torch.arange(80, dtype=torch.int32, device=device).view(5, 16))
    tables.lengths.copy_(torch.tensor([1, 4, 9, 9, 1]))
    tables.ints[:, INT_COLUMNS.index("total_len")] = torch.tensor([0, 12, 9, 10, 1], device=device)
    rows = torch.tensor([1, 2, 3, 0, 4, 1], dtype=torch.int32, device=device)
    positions = torch.tensor([-1, -1, -1, -1, -1, 7], dtype=torch.int32, device=device)
    pages = torch.zeros(5, 4, dtype=torch.int32, device=device)
    kept = torch.zeros_like(rows), torch.zeros_like(rows)
    input_ids, _ = decode_inputs(tables, [PageTable(pages, 4, 24)], rows, positions, kept)
    assert kept[0].tolist() == [1, 0, 3, 0, 0, 1], "such a row is padding for what must not happen twice"
    assert positions.tolist() == [3, 7, 8, 0, 0, 7], "a row with all of its tokens computes the last but one again"
    assert input_ids.tolist() == [16 + 3, 32 + 7, 48 + 8, 0, 64, 16 + 7]


def test_padding_rows_read_row_zero_and_write_page_zero(device: str) -> None:
    tokens, pages = (
        torch.zeros(2, 16, dtype=torch.int32, device=device),
        torch.zeros(2, 4, dtype=torch.int32).to(device),
    )
    tokens[1], pages[1] = 5, 3
    padding = torch.zeros(3, dtype=torch.int32, device=device)
    input_ids, slot_mapping = decode_inputs(tables_of(tokens), [PageTable(pages, 4, 24)], padding, padding.clone())
    assert input_ids.tolist() == [0, 0, 0] and slot_mapping.tolist() == [[0, 0, 0]]


def test_a_batch_of_no_rows_is_empty_and_scattered_tables_are_refused(device: str) -> None:
    table = torch.zeros(4, 4, dtype=torch.int32, device=device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    empty = decode_inputs(tables_of(table), [PageTable(table, 4, 4)] * 2, none, none)
    assert [t.shape for t in empty] == [(0,), (2, 0)]
    with pytest.raises(ValueError, match="contiguous"):
        decode_inputs(tables_of(table.T), [PageTable(table, 4, 4)], none, none)


@pytest.mark.parametrize("batch", [1, 5, 130])
def test_slots_of_several_groups_equal_the_oracle(batch: int, device: str) -> None:
    """Tables of all positions and of rings, next to each other in one tensor."""
    tables = tables_of(torch.randint(0, 1000, (9, 64), dtype=torch.int32, device=device))
    pages = torch.randint(0, 2**30, (9, 8 + 6 + 10), dtype=torch.int32, device=device)
    pages[:, 11:14], pages[:, 19:24] = pages[:, 8:11], pages[:, 14:19]
    groups = [
        PageTable(pages[:, :8], 8, 80),
        PageTable(pages[:, 8:14], 8, 80, window=9, ring=3),
        PageTable(pages[:, 14:], 8, 80, window=20, ring=5),
    ]
    rows = torch.randint(0, 9, (batch,), dtype=torch.int32, device=device)
    positions = torch.randint(-64, 64, (batch,), dtype=torch.int32, device=device).clamp(min=-1)
    again = positions.clone()
    ids, slots = decode_inputs(tables, groups, rows, positions)
    expected_ids, expected = decode_inputs_reference(tables, groups, rows, again)
    assert torch.equal(ids, expected_ids) and torch.equal(slots, expected) and slots.shape == (3, batch)
