"""Fair queue between clients, for example API keys.

Implements start-time fair queueing (Demers, Keshav and Shenker, 1989) for costs that are known only afterwards. Each
client has a virtual time, which `charge` advances. The client with the lowest virtual time plus expected cost is next;
the expected cost is the cost of the client's previous item. A client that was idle continues at the current virtual
time. Items of one client are taken first in, first out. With a cost of 1 for each item, clients take turns.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


def _always(_client: str) -> bool:
    return True


class FairQueue(Generic[Item]):
    """Queue of items, each of a client."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Item]] = {}
        """Items by client, without empty entries; the client that has waited longest comes first."""
        self._times: dict[str, float] = {}
        """Virtual times of clients that are ahead of `_now`, or have items."""
        self._expected: dict[str, float] = {}
        """Cost of the previous item of these clients."""
        self._now = 0.0
        """Virtual time at which the last item was taken."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Item]:
        return (item for items in self._waiting.values() for item in items)

    def add(self, client: str, item: Item) -> None:
        """Append an item of a client."""
        if client not in self._waiting:
            self._waiting[client] = deque()
            self._times[client] = max(self._times.get(client, 0.0), self._now)
        self._waiting[client].append(item)

    def peek(self, is_eligible: Callable[[str], bool] = _always) -> tuple[str, Item] | None:
        """Return the next item with its client; None if there is none.

        is_eligible: return False for clients to skip.
        """
        client = min(filter(is_eligible, self._waiting), key=self._next_end, default=None)
        return None if client is None else (client, self._waiting[client][0])

    def take(self, is_eligible: Callable[[str], bool] = _always) -> tuple[str, Item] | None:
        """Remove and return the next item, as `peek` does."""
        found = self.peek(is_eligible)
        if found is not None:
            client = found[0]
            self._now = max(self._now, self._times[client])
            self._waiting[client].popleft()
            self._drop_empty(client)
        return found

    def remove(self, item: Item) -> None:
        """Remove an item from all clients."""
        for client in [client for client, items in self._waiting.items() if item in items]:
            self._waiting[client] = deque(each for each in self._waiting[client] if each != item)
            self._drop_empty(client)

    def clear(self) -> None:
        """Remove all items."""
        self._waiting.clear()

    def charge(self, client: str, cost: float) -> None:
        """Advance the virtual time of a client by a cost.

        A negative cost corrects an earlier charge.
        """
        if client not in self._waiting:
            self._times[client] = max(self._times.get(client, 0.0), self._now)
        self._times[client] += cost
        if len(self._times) > 2 * len(self._waiting) + 64:
            self._forget_idle()

    def expect(self, client: str, cost: float) -> None:
        """Set the expected cost of a client's next item."""
        self._expected[client] = cost

    def _next_end(self, client: str) -> float:
        return self._times[client] + self._expected.get(client, 0.0)

    def _drop_empty(self, client: str) -> None:
        if not self._waiting[client]:
            del self._waiting[client]

    def _forget_idle(self) -> None:
        """Forget clients that would continue at the current virtual time."""
        self._times = {
            client: time for client, time in self._times.items() if time > self._now or client in self._waiting
        }
        self._expected = {client: cost for client, cost in self._expected.items() if client in self._times}
