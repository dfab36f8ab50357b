"""Answers to changes of the adapters, which wait until all frontends know the new list."""

from collections.abc import Callable, Collection

from msgspec import Struct

from tandem.engine_core.lora.adapters import CallResult

MAX_SECONDS = 5.0
"""Longest wait of an answer: a frontend that is silent for as long loses its connection, and one of an earlier version
never says what it knows."""


class _Announced(Struct):
    """A result that frontends have to hear of."""

    result: CallResult
    changes: int
    until: float


class Announcements:
    """Results of calls, each given out once all other frontends know the adapters that it leaves.

    So a client can use an adapter via any frontend as soon as its load was answered.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._known: dict[bytes, int] = {}
        """Number of changes that each frontend knows of."""
        self._open: list[_Announced] = []

    def note(self, client: bytes, changes: int) -> None:
        """Record that a frontend knows the adapters as of a number of changes."""
        self._known[client] = max(changes, self._known.get(client, changes))

    def forget(self, client: bytes) -> None:
        """Forget a frontend that is gone."""
        self._known.pop(client, None)

    def add(self, result: CallResult, changes: int) -> None:
        """Add the result of a call. changes: number of changes so far."""
        until = self.clock() if result.problem else self.clock() + MAX_SECONDS
        self._open.append(_Announced(result, changes, until))

    def take(self, clients: Collection[bytes]) -> list[CallResult]:
        """Return the results that can be given out now, each once. clients: the connected frontends."""
        if not self._open:
            return []
        now, found, waiting = self.clock(), [], []
        for one in self._open:
            others = (client for client in clients if client != one.result.client)
            if now >= one.until or all(self._known.get(client, -1) >= one.changes for client in others):
                found.append(one.result)
            else:
                waiting.append(one)
        self._open = waiting
        return found
