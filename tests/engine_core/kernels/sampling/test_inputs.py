"""Positions known only to the device, and parts of a batch."""

from dataclasses import fields

import torch
from torch import Tensor

from tandem.engine_core.kernels.sampling.inputs import INT_COLUMNS, SamplingBatch
from tests.support.sampling_case import make_case


def column(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_negative_positions_become_those_of_the_newest_tokens() -> None:
    """The second to last for a row with all tokens computed, the first for an empty row, 0 for padding."""
    tables = make_case(3, 10).tables
    tables.lengths[:] = column(1, 7, 9, 0, 10, 1)
    tables.ints[:, INT_COLUMNS.index("total_len")] = column(0, 9, 9, 9, 12, 9)
    rows, positions = column(1, 2, 3, 0, 4, 4, 1), column(-1, -1, -1, -1, 3, -1, 0)
    tables.find_positions(rows, positions)
    assert positions.tolist() == [6, 7, 0, 0, 3, 9, 0]


def test_a_part_of_a_batch_views_the_rows_of_all_its_tensors() -> None:
    case = make_case(6, 40)
    sampled, allowed, masked = column(*range(6)), torch.arange(12, dtype=torch.int32).view(6, 2), column(*range(6))
    batch = SamplingBatch(case.logits, case.rows, case.positions, sampled, allowed, 5, 17, masked)
    assert batch.part(0, 6) is batch and batch.part(0, 9) is batch
    part = batch.part(2, 5)
    for field in fields(SamplingBatch):
        whole, some = getattr(batch, field.name), getattr(part, field.name)
        assert torch.equal(whole[2:5], some) if isinstance(whole, Tensor) else whole == some
    part.sampled[:] = -1
    assert sampled.tolist() == [0, 1, -1, -1, -1, 5]
    rest = SamplingBatch(case.logits, case.rows, case.positions, sampled).part(4, 9)
    assert (len(rest.logits), rest.allowed, rest.masked) == (2, None, None)
