"""Times at which refused requests are told to return."""

import pytest

from tandem.frontend.engine.retry_queue import MAX_SECONDS, RetryQueue
from tests.fakes.clock import FakeClock


def queue(clock: FakeClock, uniform: float = 0.0) -> RetryQueue:
    return RetryQueue(clock, lambda: uniform)


def observe(busy: RetryQueue, clock: FakeClock, seconds: int, departures: int, is_full: bool = True) -> None:
    busy.observe(0, is_full)
    for _ in range(seconds):
        clock.advance(1)
        busy.observe(departures, is_full)


@pytest.mark.parametrize(("excess", "seconds"), [(-5, 1), (0, 1), (4, 1), (5, 2), (40, 10), (240, 60)])
def test_time_follows_the_assumed_rate_where_nothing_was_observed(excess: int, seconds: int) -> None:
    assert queue(FakeClock()).refuse(excess, 1, 4.0) == seconds


def test_observed_rate_takes_the_place_of_the_assumed_one() -> None:
    clock = FakeClock()
    busy = queue(clock)
    observe(busy, clock, 300, 10)
    assert busy.refuse(300, 1, 10.0) == 30
    assert queue(clock).refuse(300, 1, 10.0) == 30
    assert 30 <= busy.refuse(300, 0, 1.0) <= 34, "the assumed rate has a tenth of the weight"


def test_a_queue_that_is_not_full_tells_nothing() -> None:
    clock = FakeClock()
    idle = queue(clock)
    observe(idle, clock, 100, 1, is_full=False)
    assert idle.refuse(40, 1, 4.0) == 10


def test_each_refused_request_returns_after_those_before_it() -> None:
    clock = FakeClock()
    full = queue(clock)
    assert [full.refuse(1, 1, 2.0) for _ in range(8)] == [1, 1, 2, 2, 3, 3, 4, 4]
    clock.advance(2)  # four of them have returned
    assert full.refuse(1, 1, 2.0) == 3


def test_requests_of_other_processes_return_between_ones_own() -> None:
    full = queue(FakeClock())
    assert [full.refuse(1, 1, 2.0, sharers=4) for _ in range(3)] == [1, 3, 5]


def test_times_are_spread_and_end_at_the_longest() -> None:
    assert queue(FakeClock(), 0.0).refuse(40, 1, 2.0) == 20
    assert queue(FakeClock(), 0.999).refuse(40, 1, 2.0) == 25
    assert [queue(FakeClock(), at).refuse(10_000, 1, 2.0) for at in (0.0, 0.5, 0.999)] == [MAX_SECONDS, 45, 31]
