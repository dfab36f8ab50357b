"""The Triton gather of a decode step's inputs against its oracle: integers, so they are equal."""

import pytest
import torch

from tandem.engine_core.kernels.attention.decode_inputs import decode_inputs, decode_inputs_reference


@pytest.mark.parametrize("batch", [1, 5, 130])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equals_the_oracle(batch: int, dtype: torch.dtype, device: str) -> None:
    tokens = torch.randint(0, 1000, (9, 64), dtype=torch.int32, device=device)
    pages = torch.randint(0, 2**30, (9, 8), dtype=torch.int32, device=device)
    rows = torch.randint(0, 9, (batch,), dtype=dtype, device=device)
    positions = torch.randint(0, 64, (batch,), dtype=dtype, device=device)
    found = decode_inputs(tokens, pages, rows, positions, 8)
    for ours, expected in zip(found, decode_inputs_reference(tokens, pages, rows, positions, 8), strict=True):
        assert ours.dtype == torch.int64
        assert torch.equal(ours, expected)


def test_padding_rows_read_row_zero_and_write_page_zero(device: str) -> None:
    tokens, pages = (
        torch.zeros(2, 16, dtype=torch.int32, device=device),
        torch.zeros(2, 4, dtype=torch.int32).to(device),
    )
    tokens[1], pages[1] = 5, 3
    padding = torch.zeros(3, dtype=torch.int32, device=device)
    input_ids, slot_mapping = decode_inputs(tokens, pages, padding, padding, 4)
    assert input_ids.tolist() == slot_mapping.tolist() == [0, 0, 0]


def test_nothing_and_scattered_tables(device: str) -> None:
    table = torch.zeros(4, 4, dtype=torch.int32, device=device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    assert [t.shape[0] for t in decode_inputs(table, table, none, none, 4)] == [0, 0]
    with pytest.raises(ValueError, match="contiguous"):
        decode_inputs(table.T, table, none, none, 4)
