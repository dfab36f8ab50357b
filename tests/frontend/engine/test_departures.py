"""Estimates of when a queue has room again."""

import pytest

from tandem.frontend.engine.departures import MAX_SECONDS, WINDOW_SECONDS, Departures


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_departures_the_estimate_is_one_second() -> None:
    assert Departures(Clock()).seconds_until(1000) == 1


@pytest.mark.parametrize(("amount", "seconds"), [(1, 1), (4, 1), (5, 2), (40, 10), (10_000, MAX_SECONDS)])
def test_estimate_follows_the_rate(amount: int, seconds: int) -> None:
    clock = Clock()
    departures = Departures(clock)
    for _ in range(10):
        departures.add(4)
        clock.now += 1
    assert departures.seconds_until(amount) == seconds


def test_departures_before_the_window_are_forgotten() -> None:
    clock = Clock()
    departures = Departures(clock)
    departures.add(1_000_000)
    clock.now += WINDOW_SECONDS - 1
    assert departures.seconds_until(10) == 1
    departures.add(1)
    clock.now += 2
    assert departures.seconds_until(3) == 6
    clock.now += WINDOW_SECONDS + 2
    assert departures.seconds_until(10) == 1
