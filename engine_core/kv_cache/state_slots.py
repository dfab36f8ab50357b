"""Slots of checkpoints, and which one is given up for another."""

from collections import Counter
from collections.abc import Callable


class StateSlots:
    """Slots on the device for copies of recurrent states, by owner.

    Owners are nodes of the prefix cache, and other integers for copies that are not shared. If no slot is free, the
    copy is given up that is least worth keeping, by GreedyDual (Young, 1994): each copy has a priority, set when it is
    made or used to its cost plus the priority of the copy that was given up last, and the lowest goes first. All
    copies take equally many bytes. So a copy stays the longer, the more tokens it saves and the later it was used.

    The cost of a copy grows when the copy before it on its path is given up. It is renewed when the copy is used, and
    when it would be given up: no others are needed to choose.
    """

    def __init__(self, total: int) -> None:
        """Start with all slots free."""
        self.total = total
        self.cost_of: Callable[[int, int], int] | None = None
        """Function that returns the present cost of an owner's copy, given the one that it had last; None: costs do not
        change."""
        self.num_evicted = 0
        """Number of copies given up for others since the start."""
        self._free = list(range(total - 1, -1, -1))
        self._slots: dict[int, int] = {}
        """Slot by owner."""
        self._costs: dict[int, int] = {}
        self._priorities: dict[int, int] = {}
        self._locks = Counter[int]()
        """Number of planned copies from each slot."""
        self._floor = 0
        """Priority of the copy that was given up last."""

    def __contains__(self, owner: int) -> bool:
        return owner in self._slots

    @property
    def used(self) -> int:
        """Number of slots that have an owner."""
        return len(self._slots)

    @property
    def owners(self) -> list[int]:
        """Owner of each slot in use."""
        return list(self._slots)

    def slot(self, owner: int) -> int:
        """Return the slot of an owner that has one."""
        return self._slots[owner]

    def acquire(self, owner: int, cost: int) -> int | None:
        """Return a slot for an owner that has none, or None if all are locked.

        cost: tokens to compute if the copy were missing.
        """
        assert owner not in self._slots, f"{owner} has slot {self._slots[owner]}"
        if not self._free and not self._evict():
            return None
        slot = self._slots[owner] = self._free.pop()
        self._costs[owner] = cost
        self.touch(owner)
        return slot

    def touch(self, owner: int) -> None:
        """Note the use of an owner's copy."""
        if self.cost_of is not None:
            self._costs[owner] = self.cost_of(owner, self._costs[owner])
        self._priorities[owner] = self._floor + self._costs[owner]

    def lock(self, owner: int) -> int:
        """Keep the copy of an owner until `unlock`; return its slot."""
        slot = self._slots[owner]
        self._locks[slot] += 1
        self.touch(owner)
        return slot

    def is_locked(self, owner: int) -> bool:
        """Return whether an owner has a copy that is locked."""
        return owner in self._slots and self._locks[self._slots[owner]] > 0

    def unlock(self, slot: int) -> None:
        """Undo one `lock`."""
        assert self._locks[slot] > 0, f"slot {slot} unlocked without a lock"
        self._locks[slot] -= 1
        if not self._locks[slot]:
            del self._locks[slot]

    def release(self, owner: int) -> int | None:
        """Free the slot of an owner; return it, None if there is none."""
        slot = self._slots.pop(owner, None)
        if slot is None:
            return None
        assert not self._locks[slot], f"slot {slot} of {owner} freed with {self._locks[slot]} locks"
        del self._costs[owner], self._priorities[owner]
        self._free.append(slot)
        return slot

    def _evict(self) -> bool:
        """Free the slot of the copy with the lowest priority; return False if all are locked."""
        unlocked = [owner for owner, slot in self._slots.items() if not self._locks[slot]]
        if not unlocked:
            return False
        victim = min(unlocked, key=self._priorities.__getitem__)
        while self._has_grown(victim):
            victim = min(unlocked, key=self._priorities.__getitem__)
        self._floor = self._priorities[victim]
        self.release(victim)
        self.num_evicted += 1
        return True

    def _has_grown(self, owner: int) -> bool:
        """Renew the cost of an owner's copy; return whether it was too low."""
        before = self._costs[owner]
        cost = before if self.cost_of is None else self.cost_of(owner, before)
        if cost > before:
            self._costs[owner] = cost
            self._priorities[owner] += cost - before
        return cost > before

    def audit(self, planned: Counter[int]) -> list[str]:
        """Return the inconsistencies of slots and locks, one line each. planned: copies from each slot."""
        problems = []
        held = sorted((*self._free, *self._slots.values()))
        if held != list(range(self.total)):
            problems.append(f"slots {held} of {self.total} are free or have an owner")
        if planned != self._locks:
            problems.append(f"slots are locked by {dict(self._locks)}, planned copies need {dict(planned)}")
        if not self._slots.keys() == self._costs.keys() == self._priorities.keys():
            problems.append("costs and priorities differ from the owners")
        return problems
