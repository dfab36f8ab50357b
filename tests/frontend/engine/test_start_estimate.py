"""Estimates of when an engine will be ready."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.engine.start_estimate import MAX_SECONDS, UNKNOWN_SECONDS, StartEstimate
from tandem.frontend.process import STEADY_SECONDS
from tandem.protocol.events import Heartbeat, Phase
from tandem.protocol.stats import EngineStats

Beat = tuple[float, int, Phase, int]
FIRST_LIFE: list[Beat] = [(0.0, 1, Phase.STARTING, 0), (10.0, 1, Phase.LOADING, 50), (20.0, 1, Phase.READY, 100)]


def estimate_after(beats: list[Beat]) -> StartEstimate:
    estimate = StartEstimate()
    for at, epoch, phase, percent in beats:
        estimate.observe(Heartbeat(epoch, phase, percent, "", 0, EngineStats()), at)
    return estimate


@pytest.mark.parametrize(
    ("beats", "now", "seconds"),
    [
        ([], 3.0, UNKNOWN_SECONDS),
        (FIRST_LIFE[:1], 8.0, UNKNOWN_SECONDS),
        (FIRST_LIFE[:2], 10.0, 10),  # half of it in 10 s
        ([(0.0, 1, Phase.LOADING, 50)], 10.0, UNKNOWN_SECONDS),  # its beginning was not heard
        ([(0.0, 1, Phase.LOADING, 50), (10.0, 1, Phase.LOADING, 75)], 10.0, 10),  # a quarter of it in 10 s
        ([(0.0, 1, Phase.LOADING, 50), (10.0, 1, Phase.LOADING, 100)], 11.0, 1),
        (
            [
                (0.0, 1, Phase.LOADING, 50),
                (1.0, 1, Phase.READY, 100),
                (31.0, 2, Phase.READY, 100),
                (45.0, 3, Phase.LOADING, 20),
            ],
            46.0,
            15,
        ),  # a restart took 30 s, and 15 s have passed
        ([*FIRST_LIFE, (100.0, 1, Phase.READY, 100)], 104.0, 16),  # dead since 4 s, a start takes 20
        ([*FIRST_LIFE, (100.0, 1, Phase.FAILED, 0)], 104.0, UNKNOWN_SECONDS),  # not ready for longer than that
        ([*FIRST_LIFE, (30.0, 2, Phase.STARTING, 0)], 35.0, 15),
        ([*FIRST_LIFE, (30.0, 2, Phase.STARTING, 0)], 55.0, UNKNOWN_SECONDS),  # slower than the last time
        ([*FIRST_LIFE, (24.0, 2, Phase.STARTING, 0), (50.0, 2, Phase.READY, 100)], 51.0, 29),  # a restart took 30 s
        ([(0.0, 1, Phase.STARTING, 0), (600.0, 1, Phase.READY, 100)], 601.0, MAX_SECONDS),
    ],
)
def test_estimate_is_what_is_left_of_the_last_start(beats: list[Beat], now: float, seconds: int) -> None:
    assert estimate_after(beats).seconds(now) == seconds


def test_restart_counts_from_the_loss_and_not_from_a_silence_before_it() -> None:
    estimate = estimate_after([*FIRST_LIFE, (100.0, 1, Phase.READY, 100)])
    estimate.lose(105.0)
    assert estimate.seconds(105.0) == 21, "a start, and the supervisor's pause before it"
    for at, phase, percent in ((110.0, Phase.STARTING, 0), (140.0, Phase.READY, 100)):
        estimate.observe(Heartbeat(2, phase, percent, "", 0, EngineStats()), at)
    estimate.lose(200.0)
    assert estimate.seconds(201.0) == 34, "the restart took 35 s since the loss"
    estimate.observe(Heartbeat(3, Phase.STARTING, 0, "", 0, EngineStats()), 205.0)
    estimate.lose(220.0)
    assert estimate.seconds(220.0) == 15, "the loss of an engine that was not ready yet tells nothing"


def test_restart_takes_what_the_process_took_before_its_first_heartbeat_too() -> None:
    """The frontend heard no more of the first start than its end."""
    estimate = StartEstimate()
    estimate.observe(Heartbeat(1, Phase.READY, 100, "", 0, EngineStats(start_seconds=4.0)), 10.0)
    estimate.lose(60.0)
    assert [estimate.seconds(now) for now in (60.0, 61.0, 64.0)] == [5, 4, 1]


def test_pause_before_a_restart_grows_while_the_engine_ends_again_and_again() -> None:
    estimate = StartEstimate()
    told = []
    for life, ready_at in enumerate((10.0, 15.5, 22.0), 1):  # each start takes 4 s, after pauses of 0.5 and 1 s
        estimate.observe(Heartbeat(life, Phase.READY, 100, "", 0, EngineStats(start_seconds=4.0)), ready_at)
        estimate.lose(ready_at + 1.0)
        told.append(estimate.seconds(ready_at + 1.0))
        estimate.lose(ready_at + 1.2)  # as the supervisor sees it
    assert told == [5, 5, 7]
    estimate.observe(Heartbeat(4, Phase.READY, 100, "", 0, EngineStats()), 29.2)
    estimate.lose(29.2 + STEADY_SECONDS + 1.0)
    assert estimate.seconds(29.2 + STEADY_SECONDS + 1.0) == 5


def test_engine_that_is_going_to_be_killed_starts_after_that() -> None:
    estimate = estimate_after(FIRST_LIFE)
    estimate.lose(108.0)
    assert estimate.seconds(105.0) == 24


@given(
    st.lists(
        st.tuples(st.floats(0, 1e4), st.integers(1, 3), st.sampled_from(list(Phase)), st.integers(0, 100)), max_size=20
    ),
    st.floats(0, 1e4),
)
def test_estimate_is_bounded(beats: list[Beat], later: float) -> None:
    beats.sort(key=lambda beat: beat[0])
    assert 1 <= estimate_after(beats).seconds((beats[-1][0] if beats else 0.0) + later) <= MAX_SECONDS
