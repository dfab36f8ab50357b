"""Slots of checkpoints, and the order in which they are given up."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tandem.engine_core.kv_cache.state_slots import StateSlots


def test_the_cheapest_goes_first() -> None:
    slots = StateSlots(2)
    slots.acquire(1, 500)
    slots.acquire(2, 100)
    assert slots.acquire(3, 50) is not None
    assert sorted(slots.owners) == [1, 3]
    assert slots.num_evicted == 1


def test_a_copy_that_is_not_used_goes_in_the_end_however_much_it_saves() -> None:
    slots = StateSlots(2)
    slots.acquire(0, 1000)
    for owner in range(1, 50):
        assert slots.acquire(owner, 100) is not None
    assert 0 not in slots


def test_a_copy_that_is_used_stays() -> None:
    slots = StateSlots(2)
    slots.acquire(0, 300)
    for owner in range(1, 50):
        slots.touch(0)
        slots.acquire(owner, 100)
        assert 0 in slots


def test_locked_slots_are_kept() -> None:
    slots = StateSlots(1)
    first = slots.acquire(1, 10)
    assert slots.lock(1) == first
    assert slots.acquire(2, 1000) is None
    assert first is not None
    slots.unlock(first)
    assert slots.acquire(2, 1000) == first
    assert StateSlots(0).acquire(1, 5) is None


@given(st.integers(0, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(1, 100)), max_size=60))
def test_slots_are_never_lost(total: int, moves: list[tuple[int, int, int]]) -> None:
    """Acquire, release, lock and unlock at random; the audit counts."""
    slots, locks = StateSlots(total), Counter[int]()
    for kind, owner, cost in moves:
        held = owner in slots
        if kind == 0 and not held:
            free = slots.used < total or any(not locks[slots.slot(other)] for other in slots.owners)
            assert (slots.acquire(owner, cost) is not None) == free
        elif kind == 1 and held and not locks[slots.slot(owner)]:
            slots.release(owner)
        elif kind == 2 and held:
            locks[slots.lock(owner)] += 1
        elif kind == 3 and held and locks[slots.slot(owner)]:
            slots.unlock(slots.slot(owner))
            locks[slots.slot(owner)] -= 1
        assert slots.audit(+locks) == []
        assert slots.used <= total


def test_a_copy_whose_cost_has_grown_is_kept() -> None:
    slots, costs = StateSlots(2), {1: 50, 2: 100, 3: 80}
    for owner in (1, 2):
        slots.acquire(owner, costs[owner])
    costs[1] = 150
    slots.cost_of = lambda owner, _: costs[owner]
    slots.acquire(3, costs[3])
    assert sorted(slots.owners) == [1, 3]
    costs[1] = 10
    slots.touch(1)
    slots.acquire(2, costs[2])
    assert sorted(slots.owners) == [2, 3], "a lower cost counts from the next use on"
