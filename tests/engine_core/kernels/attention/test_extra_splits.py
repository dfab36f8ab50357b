"""Extra splits of decode attention: their assignment, and equal results."""

import pytest
import torch

from tandem.engine_core.kernels.attention import extra_splits
from tandem.engine_core.kernels.attention.decode_plans import choose_splits
from tandem.engine_core.kernels.attention.extra_splits import (
    assign_extra_splits,
    choose_extra_splits,
    max_len_without_extra_splits,
)
from tandem.engine_core.kernels.attention.paged_decode import paged_decode
from tandem.engine_core.kernels.reference import attention as reference
from tests.engine_core.kernels.attention.test_paged_decode import SMALL, inputs

BALANCE = 32
"""Positions per split in these tests."""


@pytest.fixture(autouse=True)
def short_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra_splits, "BALANCE", BALANCE)


def shared(lengths: list[int], splits: int, count: int, device: str) -> tuple[list[int], list[int]]:
    """Return the number of extra splits of each row, and the row of each extra split."""
    positions = torch.tensor(lengths, dtype=torch.int32, device=device) - 1
    extra_splits = assign_extra_splits(positions, splits, count)
    assert extra_splits is not None and extra_splits.count == count
    first, more, served = extra_splits.plan.split([len(lengths), len(lengths), count])
    for row, (begin, number) in enumerate(zip(first.tolist(), more.tolist(), strict=True)):
        assert served[begin : begin + number].tolist() == [row] * number
    return more.tolist(), served.tolist()


@pytest.mark.parametrize(
    ("lengths", "splits", "count", "more"),
    [
        ([1, 32, 5], 1, 4, [0, 0, 0]),
        ([33, 1, 64, 65], 1, 4, [1, 0, 1, 2]),
        ([33, 1, 64, 65], 2, 4, [0, 0, 0, 1]),
        ([160, 1], 1, 4, [4, 0]),
        ([161, 1], 1, 4, [2, 0]),  # 64 positions each, since five more splits are too many.
        ([1000, 64, 1000], 1, 4, [1, 0, 1]),
        ([1000] * 5, 1, 4, [0] * 5),
    ],
)
def test_long_rows_get_the_extra_splits_and_none_too_many(
    lengths: list[int], splits: int, count: int, more: list[int], device: str
) -> None:
    found, served = shared(lengths, splits, count, device)
    assert found == more
    assert served == [row for row, number in enumerate(more) for _ in range(number)] + [-1] * (count - sum(more))


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_rows_within_the_reach_get_none(splits: int, device: str) -> None:
    reach = max_len_without_extra_splits(splits)
    assert shared([1, reach, reach + 1], splits, 6, device)[0] == [0, 0, 1]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("lengths", [[1, 20, 32], [200, 1, 33], [70, 90, 64, 100]])
def test_extra_splits_change_no_result(lengths: list[int], splits: int, window: int | None, device: str) -> None:
    given = inputs(lengths, 4, 2, 32, 8, device)
    extra_splits = assign_extra_splits(given.positions, splits, 6)
    expected = reference.paged_decode(*given, 0.2, window)
    for _ in range(2):  # The second launch finds its counters at zero.
        found = paged_decode(*given, 0.2, splits, window=window, tile=SMALL, least=16, extra_splits=extra_splits)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_the_maximum_length_sets_extra_splits_but_not_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a step's usual rows are the same whatever `--max-len` is."""
    monkeypatch.undo()
    for rows in (16, 64, 256, 1024):
        splits = choose_splits(rows, 8, 132, 131_072)
        assert splits == choose_splits(rows, 8, 132, 4096)
        assert choose_extra_splits(rows, 8, 132, 4096, splits) == 0
        extra_splits = choose_extra_splits(rows, 8, 132, 131_072, splits)
        assert extra_splits % splits == 0 and 132 <= 8 * extra_splits < 132 + 8 * splits
    assert choose_extra_splits(1, 8, 132, 131_072, choose_splits(1, 8, 132, 131_072)) == 0
    assert choose_extra_splits(0, 8, 132, 131_072, 1) == 0
    assert assign_extra_splits(torch.zeros(1, dtype=torch.int32), 1, 0) is None
