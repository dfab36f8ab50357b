"""How many prompt tokens wait in the engine for their first output."""

from collections.abc import Iterable


class PromptQueue:
    """Sequences by id, from their submission to their first event."""

    def __init__(self) -> None:
        self.tokens = 0
        self._lengths: dict[int, int] = {}

    def add(self, request_id: int, length: int) -> None:
        self._lengths[request_id] = length
        self.tokens += length

    def remove(self, request_id: int) -> None:
        """Idempotent."""
        self.tokens -= self._lengths.pop(request_id, 0)

    def remove_all(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            self.remove(request_id)
