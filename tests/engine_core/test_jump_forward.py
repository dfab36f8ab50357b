"""Tokens that a grammar forces take no steps of their own, with one step in flight or two."""

import pytest

from tests.fakes.constraint import FakeConstraint
from tests.fakes.model import reference
from tests.support.recorded_engine import CLIENT, Bench


@pytest.mark.parametrize("depth", [1, 2])
def test_jump_forward_takes_fewer_steps(depth: int) -> None:
    bench = Bench(depth)
    bench.submit(1, 12, "runs 8")
    bench.finish()
    assert bench.mailbox.received[CLIENT, 1] == reference([3, 4, 5], 12, frozenset(), 0, FakeConstraint("runs 8"))
    assert bench.stats.generation_tokens == 12
    assert bench.stats.steps_launched <= 4


def test_jump_forward_saves_steps_with_two_in_flight_too() -> None:
    """A step more for each run: the token before it is computed by the step in flight."""
    steps = {1: 0, 2: 0}
    for depth in steps:
        for begins in range(12):
            bench = Bench(depth)
            bench.submit(1, 55, grammar := f"runs {begins}")
            bench.finish()
            expected = reference([3, 4, 5], 55, frozenset(), 0, FakeConstraint(grammar))
            assert bench.mailbox.received[CLIENT, 1] == expected
            steps[depth] += bench.stats.steps_launched
    assert steps[1] <= 0.51 * 12 * 55
    assert steps[2] <= 0.67 * 12 * 55
