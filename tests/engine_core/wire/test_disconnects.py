"""Number and order of the probes after connections have closed."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from tandem.engine_core.wire.disconnects import CHECK_SECONDS, MAX_PROBED, PROBES, Disconnects

FRONTENDS = [b"%d" % number for number in range(1000)]


class Watched:
    """Watch of a socket with connections that the test closes, on a fake clock."""

    def __init__(self, context: Any) -> None:
        self.monitored = context.socket(zmq.PAIR)
        self.monitored.bind("inproc://monitor")
        monitor = context.socket(zmq.PAIR)
        monitor.connect("inproc://monitor")
        self.disconnects = Disconnects(None, monitor)
        self.now = 0.0

    def take(self, frontends: list[bytes]) -> list[bytes]:
        self.now += CHECK_SECONDS
        return self.disconnects.take_due(self.now, lambda: frontends)

    def close_connection(self) -> None:
        self.monitored.send_multipart([b"event", b"endpoint"])
        assert self.disconnects.monitor.poll(30_000)


@pytest.fixture
def watched() -> Iterator[Watched]:
    with zmq.Context() as context:
        watched = Watched(context)
        yield watched
        watched.monitored.close(linger=0)
        watched.disconnects.monitor.close(linger=0)


def test_no_frontend_is_probed_while_no_connection_closes(watched: Watched) -> None:
    assert [watched.take(FRONTENDS) for _ in range(3)] == [[], [], []]


def test_few_frontends_are_probed_together(watched: Watched) -> None:
    few = FRONTENDS[:MAX_PROBED]
    watched.close_connection()
    assert [sorted(watched.take(few)) for _ in range(PROBES + 1)] == [sorted(few)] * PROBES + [[]]


def test_a_stranger_that_reconnects_all_the_time_costs_a_bounded_number_of_probes(watched: Watched) -> None:
    probed: Counter[bytes] = Counter()
    rounds = 4 * len(FRONTENDS) // MAX_PROBED
    for _ in range(rounds):
        watched.close_connection()
        due = watched.take(FRONTENDS)
        assert len(due) == MAX_PROBED
        probed.update(due)
    assert set(probed.values()) <= {3, 4} and len(probed) == len(FRONTENDS), "all have their turns alike"


def test_the_probes_end_after_the_last_connection_has_closed(watched: Watched) -> None:
    watched.close_connection()
    probed: Counter[bytes] = Counter()
    while due := watched.take(FRONTENDS):
        probed.update(due)
    assert probed == Counter(dict.fromkeys(FRONTENDS, PROBES))


def test_a_frontend_that_is_gone_is_probed_no_more(watched: Watched) -> None:
    watched.close_connection()
    first = watched.take(FRONTENDS[:2])
    watched.disconnects.forget(first[0])
    assert watched.take(FRONTENDS[:2]) == [first[1]]
