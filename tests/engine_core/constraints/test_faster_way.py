"""Choice between two ways of the same work."""

import pytest

from tandem.engine_core.constraints.faster_way import MOST_RARELY, PROBE_EVERY, FasterWay


def run(faster_way: FasterWay, choices: int, seconds: dict[bool, float]) -> list[bool]:
    """Return the ways that were chosen; each takes as long for a piece as is said."""
    ways = []
    for _ in range(choices):
        ways.append(way := faster_way.choose())
        faster_way.record(way, 10 * seconds[way], 10)
    return ways


def test_first_way_is_taken_until_both_are_known() -> None:
    ways = run(FasterWay(), PROBE_EVERY, {True: 1.0, False: 2.0})
    assert [number for number, way in enumerate(ways, start=1) if not way] == [PROBE_EVERY]


def test_faster_way_is_taken_once_it_is_known() -> None:
    ways = run(FasterWay(), 2 * PROBE_EVERY, {True: 1.5, False: 1.0})
    assert ways == [True] * (PROBE_EVERY - 1) + [False] * (PROBE_EVERY + 1)


@pytest.mark.parametrize(("ratio", "times"), [(1.0, 1), (3.0, 3), (100.0, MOST_RARELY)])
def test_slower_way_is_tried_the_more_rarely_the_longer_it_takes(ratio: float, times: int) -> None:
    faster_way = FasterWay()
    run(faster_way, PROBE_EVERY, {True: 1.0, False: ratio})
    ways = run(faster_way, 4 * times * PROBE_EVERY, {True: 1.0, False: ratio})
    every = times * PROBE_EVERY
    assert [number for number, way in enumerate(ways, start=1) if not way] == [every, 2 * every, 3 * every, 4 * every]


def test_change_of_the_slower_way_is_found() -> None:
    faster_way = FasterWay()
    run(faster_way, 2 * PROBE_EVERY, {True: 1.0, False: 2.0})
    ways = run(faster_way, 20 * PROBE_EVERY, {True: 1.0, False: 0.1})
    assert not any(ways[10 * PROBE_EVERY : 11 * PROBE_EVERY])
    assert sum(ways) < 10 * PROBE_EVERY


def test_one_slow_step_changes_little() -> None:
    faster_way = FasterWay()
    run(faster_way, PROBE_EVERY, {True: 1.0, False: 2.0})
    faster_way.record(True, 40_000.0, 10)
    assert faster_way.choose()


def test_time_counts_for_a_piece_not_for_a_step() -> None:
    faster_way = FasterWay()
    faster_way.record(True, 10.0, 100)
    faster_way.record(False, 1.0, 1)
    assert faster_way.choose()
