"""The Triton gather of columns against its oracle, bit by bit."""

import pytest
import torch

from tandem.engine_core.kernels.gather_columns import gather_columns
from tandem.engine_core.kernels.reference import layer as reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (3, 300), (2, 1024), (2, 2100)])
def test_gather_columns_equals_its_oracle(tokens: int, width: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(tokens, width, device=device).to(dtype)
    order = torch.randperm(width, device=device).int()
    assert torch.equal(gather_columns(x, order), reference.gather_columns(x, order))


def test_gather_columns_takes_strided_rows_and_repeats_columns(device: str) -> None:
    x = torch.randn(3, 96, device=device)[:, 8:48]
    order = torch.tensor([39, 0, 0, 7], dtype=torch.int32, device=device)
    found = gather_columns(x, order)
    assert torch.equal(found, torch.stack([x[:, place] for place in (39, 0, 0, 7)], 1))
    assert found.is_contiguous()


def test_gather_columns_takes_no_rows(device: str) -> None:
    order = torch.arange(16, dtype=torch.int32, device=device)
    assert gather_columns(torch.empty(0, 16, device=device), order).shape == (0, 16)


def test_gather_columns_refuses_scattered_rows_and_other_index_dtypes(device: str) -> None:
    x, order = torch.empty(4, 8, device=device), torch.arange(8, dtype=torch.int32, device=device)
    for rows, numbers in ((x.t(), order[:4]), (x, order.long()), (x, order[::2])):
        with pytest.raises(ValueError, match="int32 order"):
            gather_columns(rows, numbers)
