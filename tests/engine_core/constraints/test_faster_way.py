"""Choice between two ways of the same work."""

from tandem.engine_core.constraints.faster_way import PROBE_EVERY, FasterWay


def run(faster_way: FasterWay, choices: int, seconds: dict[bool, float]) -> list[bool]:
    """Return the ways that were chosen; each takes as long for a piece as is said."""
    ways = []
    for _ in range(choices):
        ways.append(way := faster_way.choose())
        faster_way.record(way, 10 * seconds[way], 10)
    return ways


def test_first_way_is_taken_until_both_are_known() -> None:
    ways = run(FasterWay(), 2 * PROBE_EVERY, {True: 1.0, False: 2.0})
    assert [number for number, way in enumerate(ways, start=1) if not way] == [PROBE_EVERY, 2 * PROBE_EVERY]


def test_faster_way_is_taken_once_it_is_known() -> None:
    ways = run(FasterWay(), 2 * PROBE_EVERY, {True: 2.0, False: 1.0})
    assert ways == [True] * (PROBE_EVERY - 1) + [False] * PROBE_EVERY + [True]


def test_change_of_the_slower_way_is_found() -> None:
    faster_way = FasterWay()
    run(faster_way, 2 * PROBE_EVERY, {True: 1.0, False: 2.0})
    ways = run(faster_way, 20 * PROBE_EVERY, {True: 1.0, False: 0.1})
    assert not any(ways[-PROBE_EVERY:-1]), "the last is a probe"
    assert sum(ways) < 10 * PROBE_EVERY


def test_one_slow_step_changes_little() -> None:
    faster_way = FasterWay()
    run(faster_way, PROBE_EVERY, {True: 1.0, False: 2.0})
    faster_way.record(True, 40.0, 10)
    assert faster_way.choose()


def test_time_counts_for_a_piece_not_for_a_step() -> None:
    faster_way = FasterWay()
    faster_way.record(True, 10.0, 100)
    faster_way.record(False, 1.0, 1)
    assert faster_way.choose()
