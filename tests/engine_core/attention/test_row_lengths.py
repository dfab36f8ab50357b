"""Lengths as FlashInfer's planning handles them."""

import pytest
import torch

from tandem.engine_core.attention.row_lengths import RowLengths


@pytest.mark.parametrize("values", [[7], [3, 9, 4], [0] * 63 + [131_072]])
def test_the_longest_is_found_by_one_operation_after_copies_that_are_none(values: list[int]) -> None:
    host = torch.tensor([1_000_000, *values], dtype=torch.int32)
    lengths = host[1:].as_subclass(RowLengths).cpu().flatten()
    assert [int(value) for value in lengths] == [max(values)], "what `max` compares"
    assert max(lengths).item() == max(values)


def test_all_else_sees_every_length() -> None:
    lengths = torch.tensor([3, 9, 4], dtype=torch.int32).as_subclass(RowLengths)
    copied = torch.zeros(3, dtype=torch.int32)
    copied.copy_(lengths)
    assert copied.tolist() == lengths.tolist() == [3, 9, 4]
    assert len(lengths) == 3
    assert type(lengths + 1) is torch.Tensor, "the class does not spread"
