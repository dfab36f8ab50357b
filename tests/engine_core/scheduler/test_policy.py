"""Who takes how much, by table and by property."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.scheduler.policy import choose_rows

TABLE = [
    ("nobody", [], 8, 8, []),
    ("all decode", [1, 1, 1], 8, 8, [1, 1, 1]),
    ("a prompt that fits", [5], 8, 8, [5]),
    ("a prompt larger than the budget", [20], 8, 8, [8]),
    ("a prompt larger than a chunk", [20], 8, 3, [3]),
    ("decode before a prompt that came first", [20, 1, 1], 8, 8, [6, 1, 1]),
    ("prompts in order", [6, 6, 6], 8, 8, [6, 2, 0]),
    ("two chunks in one step", [20, 20], 8, 3, [3, 3]),
    ("budget for decode only", [20, 1, 1], 2, 2, [0, 1, 1]),
    ("nothing pending", [0, 1, 0], 8, 8, [0, 1, 0]),
    ("fewer places than decoding rows", [1, 1, 1], 2, 2, [1, 1, 0]),
]


@pytest.mark.parametrize(("name", "pending", "budget", "chunk", "takes"), TABLE, ids=[row[0] for row in TABLE])
def test_table(name: str, pending: list[int], budget: int, chunk: int, takes: list[int]) -> None:
    assert choose_rows(pending, budget, chunk) == takes, name


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 60), st.integers(1, 60))
def test_properties(pending: list[int], budget: int, chunk: int) -> None:
    takes = choose_rows(pending, budget, chunk)
    assert len(takes) == len(pending)
    assert all(
        0 <= take <= min(wanted, chunk if wanted > 1 else 1) for take, wanted in zip(takes, pending, strict=True)
    )
    assert sum(takes) <= budget
    decoding = sum(wanted == 1 for wanted in pending)
    served = sum(take for take, wanted in zip(takes, pending, strict=True) if wanted == 1)
    assert served == min(decoding, budget), "a decoding row waits only for other decoding rows"
    if any(pending):
        assert sum(takes) > 0, "whatever can run makes progress"
    prompts = [(take, wanted) for take, wanted in zip(takes, pending, strict=True) if wanted > 1]
    for (first, wanted), (later, _) in pairwise(prompts):
        assert not later or first == min(wanted, chunk), "a later prompt starts only when the one before has its share"
