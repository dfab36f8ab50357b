"""Shares of clients in a queue, and the longest that one waits for the others."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.fair_queue import FairQueue

LONGEST = 3
"""Greatest cost of an item."""


def served(queue: FairQueue[int], cost: float = 1.0) -> list[str]:
    """Serve all items, each at the same cost; return their clients."""
    order = []
    while (taken := queue.take()) is not None:
        order.append(taken[0])
        queue.charge(taken[0], cost)
    return order


def test_items_of_one_client_keep_their_order() -> None:
    queue = FairQueue[int]()
    for number in range(5):
        queue.add("", number)
    assert [queue.take() for _ in range(6)] == [*(("", number) for number in range(5)), None]


def test_clients_take_turns() -> None:
    queue = FairQueue[int]()
    for client in "aaabbc":
        queue.add(client, 0)
    assert "".join(served(queue)) == "abcaba"


def test_client_that_was_away_saves_no_share_and_loses_none() -> None:
    queue = FairQueue[int]()
    for _ in range(50):
        queue.add("a", 0)
    for _ in range(40):
        queue.take()
        queue.charge("a", 1.0)
    for _ in range(4):
        queue.add("b", 0)
    assert "".join(served(queue)[:8]).count("b") == 4


def test_clients_that_have_ended_are_forgotten() -> None:
    queue = FairQueue[int]()
    for number in range(5000):
        queue.add(str(number), 0)
        queue.take()
        queue.charge(str(number), 1.0)
        queue.add("next", 0)
        queue.take()
        queue.charge("next", 1.0)
    assert len(queue._times) < 1000


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, LONGEST), st.booleans()), min_size=1, max_size=80),
    st.integers(1, 3),
)
def test_no_client_waits_while_another_gets_more_than_its_share(
    arrivals: list[tuple[str, int, bool]], num_servers: int
) -> None:
    """While a client waits, no other is served for longer than it by more than the items in progress.

    Costs are charged in advance at the greatest and corrected at the end, as a lane does.
    """
    queue = FairQueue[int]()
    served_since: dict[str, dict[str, float]] = {}
    running: list[tuple[str, int]] = []
    waiting: dict[str, int] = defaultdict(int)

    def begin() -> None:
        while len(running) < num_servers and (taken := queue.take()) is not None:
            client, cost = taken
            waiting[client] -= 1
            queue.charge(client, LONGEST)
            running.append((client, cost))
            for shares in served_since.values():
                shares[client] = shares.get(client, 0.0) + cost
            if not waiting[client]:
                del served_since[client]

    def end() -> None:
        client, cost = running.pop(0)
        queue.charge(client, cost - LONGEST)
        queue.expect(client, cost)

    for client, cost, ends in arrivals:
        queue.add(client, cost)
        waiting[client] += 1
        served_since.setdefault(client, {})
        begin()
        if ends and running:
            end()
            begin()
        for own, shares in served_since.items():
            most = max(shares.values(), default=0.0)
            assert most - shares.get(own, 0.0) <= (2 * num_servers + 4) * LONGEST
    while running:
        end()
        begin()
    assert len(queue) == 0


def test_skipped_clients_keep_their_items_and_their_turn() -> None:
    queue = FairQueue[int]()
    queue.add("a", 1)
    queue.add("b", 2)
    assert queue.peek(lambda client: client == "b") == ("b", 2)
    assert queue.take(lambda client: client == "b") == ("b", 2)
    assert queue.take(lambda client: client == "b") is None
    assert (queue.peek(), len(queue)) == (("a", 1), 1)


def test_an_item_is_removed_from_all_clients() -> None:
    queue = FairQueue[int]()
    for client, item in (("a", 1), ("a", 2), ("a", 1), ("b", 1)):
        queue.add(client, item)
    queue.remove(1)
    queue.remove(3)
    assert (list(queue), len(queue)) == ([2], 1)
    assert queue.take() == ("a", 2)
    queue.add("b", 4)
    queue.clear()
    assert queue.take() is None
