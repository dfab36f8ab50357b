"""The lazy heap against a sorted list."""

import sys

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tandem.engine_core.kv_cache.eviction import EvictionQueue
from tests.support.effort import machine

PAGES = st.integers(1, 12)


class Uses(RuleBasedStateMachine):
    """Pages are used again and again, and go at times; the model is the last use of each."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = EvictionQueue()
        self.last_use: dict[int, int] = {}
        self.now = 0

    def valid(self, page: int, last_use: int) -> bool:
        return self.last_use.get(page) == last_use

    @rule(page=PAGES)
    def use(self, page: int) -> None:
        self.now += 1
        self.last_use[page] = self.now
        self.queue.push(page, self.now, self.valid, len(self.last_use))

    @rule(page=PAGES)
    def forget(self, page: int) -> None:
        self.last_use.pop(page, None)

    @rule()
    def evict(self) -> None:
        oldest = min(self.last_use, key=lambda page: self.last_use[page], default=None)
        assert self.queue.pop(self.valid) == oldest
        if oldest is not None:
            del self.last_use[oldest]

    @invariant()
    def stale_entries_stay_few(self) -> None:
        assert len(self.queue) <= 2 * 12 + EvictionQueue.SLACK
        assert self.queue.oldest_use <= min(self.last_use.values(), default=sys.maxsize)


Uses.TestCase.settings = machine(50, 60)
TestUses = Uses.TestCase


def test_node_in_steady_use_does_not_fill_the_heap() -> None:
    queue = EvictionQueue()
    for now in range(1000):
        queue.push(7, now, lambda _, use, now=now: use == now, 1)  # type: ignore[misc]
    assert len(queue) <= 2 + EvictionQueue.SLACK
    assert queue.pop(lambda _, use: use == 999) == 7
