"""A clock that does not count the time for which its own process was held up."""

from tandem.frontend.supervisor.frontends.stall_aware_clock import MAX_LAG, TICK_SECONDS, StallAwareClock
from tests.fakes.clock import FakeClock


def test_time_counts_from_tick_to_tick() -> None:
    real = FakeClock()
    clock = StallAwareClock(real)
    for _ in range(8):
        real.advance(TICK_SECONDS)
        clock.tick()
    assert clock() == 8 * TICK_SECONDS
    real.advance(TICK_SECONDS)
    assert clock() == 8 * TICK_SECONDS


def test_a_late_tick_counts_as_one_that_came_in_time() -> None:
    real = FakeClock()
    clock = StallAwareClock(real)
    real.advance(TICK_SECONDS + MAX_LAG)
    clock.tick()
    assert clock() == TICK_SECONDS + MAX_LAG
    real.advance(86400)
    clock.tick()
    assert clock() == 2 * TICK_SECONDS + MAX_LAG
