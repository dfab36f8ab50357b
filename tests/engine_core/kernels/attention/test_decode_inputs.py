"""The Triton gather of a decode step's inputs against its oracle: integers, so they must be equal."""

import pytest
import torch

from tandem.engine_core.kernels.attention.decode_inputs import decode_inputs, decode_inputs_reference
from tandem.engine_core.kernels.page_table import PageTable


@pytest.mark.parametrize("batch", [1, 5, 130])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_stride", [8, 8 * 2 * 28])
def test_gathered_inputs_equal_the_oracle(batch: int, dtype: torch.dtype, page_stride: int, device: str) -> None:
    """Slots of the highest pages exceed 32 bits."""
    tokens = torch.randint(0, 1000, (9, 64), dtype=torch.int32, device=device)
    pages = torch.randint(0, 2**30, (9, 8), dtype=torch.int32, device=device)
    rows = torch.randint(0, 9, (batch,), dtype=dtype, device=device)
    positions = torch.randint(0, 64, (batch,), dtype=dtype, device=device)
    table = PageTable(pages, 8, page_stride)
    found = decode_inputs(tokens, table, rows, positions)
    for ours, expected in zip(found, decode_inputs_reference(tokens, table, rows, positions), strict=True):
        assert ours.dtype == torch.int64
        assert torch.equal(ours, expected)


def test_padding_rows_read_row_zero_and_write_page_zero(device: str) -> None:
    tokens, pages = (
        torch.zeros(2, 16, dtype=torch.int32, device=device),
        torch.zeros(2, 4, dtype=torch.int32).to(device),
    )
    tokens[1], pages[1] = 5, 3
    padding = torch.zeros(3, dtype=torch.int32, device=device)
    input_ids, slot_mapping = decode_inputs(tokens, PageTable(pages, 4, 24), padding, padding)
    assert input_ids.tolist() == slot_mapping.tolist() == [0, 0, 0]


def test_a_batch_of_no_rows_is_empty_and_scattered_tables_are_refused(device: str) -> None:
    table = torch.zeros(4, 4, dtype=torch.int32, device=device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    assert [t.shape[0] for t in decode_inputs(table, PageTable(table, 4, 4), none, none)] == [0, 0]
    with pytest.raises(ValueError, match="contiguous"):
        decode_inputs(table.T, PageTable(table, 4, 4), none, none)
