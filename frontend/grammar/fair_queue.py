"""Queue that gives each client its share of what is waited for.

Fair queueing as of Demers, Keshav and Shenker (1989), with costs that are known afterwards: each client has a virtual
time, which its service advances. The one that would end its next item first is served next, taking what its last item
cost for what the next will. One that was away continues at the time of the others. Among the items of one client the
first comes first.
"""

from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Queue of items, each of a client."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Item]] = {}
        """Items by client, for clients that have some; the client that has waited longest comes first."""
        self._times: dict[str, float] = {}
        """Virtual times of clients that are ahead of `_now`, or have items."""
        self._expected: dict[str, float] = {}
        """Cost of the last item of these clients."""
        self._now = 0.0
        """Virtual time at which the last item was begun."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, client: str, item: Item) -> None:
        """Append an item of a client."""
        if client not in self._waiting:
            self._waiting[client] = deque()
            self._times[client] = max(self._times.get(client, 0.0), self._now)
        self._waiting[client].append(item)

    def take(self) -> tuple[str, Item] | None:
        """Remove and return the next item with its client; None if the queue is empty."""
        if not self._waiting:
            return None
        client = min(self._waiting, key=self._next_end)
        self._now = max(self._now, self._times[client])
        item = self._waiting[client].popleft()
        if not self._waiting[client]:
            del self._waiting[client]
        return client, item

    def charge(self, client: str, cost: float) -> None:
        """Advance the virtual time of a client by the cost of a service.

        A negative cost takes back a part of what was charged.
        """
        if client not in self._waiting:
            self._times[client] = max(self._times.get(client, 0.0), self._now)
        self._times[client] += cost
        if len(self._times) > 2 * len(self._waiting) + 64:
            self._forget()

    def expect(self, client: str, cost: float) -> None:
        """Take this cost, that of its last item, for the cost of a client's next."""
        self._expected[client] = cost

    def _next_end(self, client: str) -> float:
        return self._times[client] + self._expected.get(client, 0.0)

    def _forget(self) -> None:
        """Forget clients that would begin at the present time."""
        self._times = {
            client: time for client, time in self._times.items() if time > self._now or client in self._waiting
        }
        self._expected = {client: cost for client, cost in self._expected.items() if client in self._times}
