"""Estimates of when a queue has room again."""

import pytest

from tandem.frontend.engine.departures import MAX_SECONDS, WINDOW_SECONDS, Departures
from tandem.frontend.engine.streams import OpenStreams, ReadySet
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished, StepOutput


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


def test_streams_count_what_ends_and_what_has_its_first_output() -> None:
    clock = Clock()
    streams, ready = OpenStreams(clock), ReadySet()
    for number in range(4):
        streams.open(number, 0, ready, 10)
    finished = Finished(0, FinishReason.STOP)
    failure = Failure(1, ErrorCode.ENGINE_FAILED, "broken")
    streams.deliver(StepOutput(1, b"", b"", b"", [finished], [failure]))
    streams.forget([2, 7])
    clock.now += 1
    assert (streams.ended.seconds_until(30), streams.prefilled.seconds_until(300)) == (10, 10)
