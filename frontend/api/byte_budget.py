"""Memory budgets for large bodies and responses."""

from types import TracebackType

from tandem.frontend.errors import overloaded

MAX_INLINE_BODY = 64 * 1024
"""Maximum bytes of a body that is handled in the event loop and not counted against a budget."""
MAX_BODY_BYTES = 256 * 2**20
"""Total bytes of larger bodies, with the stored items that they continue, that are read, parsed and admitted
concurrently."""
MAX_STORED_BYTES = 128 * 2**20
"""Total bytes of larger responses from the store that are sent concurrently, and of inputs that wait to be stored."""


class ByteBudget:
    """Bytes that a process may hold for one purpose; an API key may use half of them.

    A larger request is admitted alone.
    """

    def __init__(self, max_bytes: int, what: str) -> None:
        """Initialize with the limit. what: plural noun for messages."""
        self.max_bytes = max_bytes
        self.what = what
        self.used = 0
        self.used_by: dict[str, int] = {}
        """Bytes held by each owner."""

    def reservation(self, owner: str = "") -> "Reservation":
        """Return an empty reservation for one request.

        Requests of a server without API keys have the owner "", which may use the whole budget.
        """
        return Reservation(self, owner)


class Reservation:
    """Bytes of a budget held by a request.

    They are released at the end of its `with` block.
    """

    def __init__(self, budget: ByteBudget, owner: str) -> None:
        self._budget = budget
        self._owner = owner
        self._held = 0

    def grow(self, size: int) -> None:
        """Extend the reservation to `size` bytes.

        Raises ApiError 429 if the budget or the owner's half of it is exhausted. Up to MAX_INLINE_BODY bytes are not
        counted.
        """
        if size <= MAX_INLINE_BODY:
            return
        budget, added = self._budget, size - self._held
        own = budget.used_by.get(self._owner, 0)
        for used, limit, scope in (
            (budget.used, budget.max_bytes, ""),
            (own, budget.max_bytes // 2 if self._owner else budget.max_bytes, " of this API key"),
        ):
            if used + added > limit and used > self._held:
                raise overloaded(
                    f"{budget.what}{scope} take {used} bytes, at most {limit} are allowed at once; try again later",
                    refusal="bodies",
                )
        self._add(added)

    def release(self) -> None:
        """Release the bytes. Idempotent."""
        self._add(-self._held)

    def _add(self, size: int) -> None:
        self._held += size
        self._budget.used += size
        own = self._budget.used_by.pop(self._owner, 0) + size
        if own:
            self._budget.used_by[self._owner] = own

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
