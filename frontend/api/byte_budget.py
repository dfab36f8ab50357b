"""Budgets of the memory that large bodies and answers take."""

from types import TracebackType

from tandem.frontend.errors import overloaded

MAX_INLINE_BODY = 64 * 1024
"""Largest body in bytes that is handled in the event loop and not counted against a budget."""
MAX_BODY_BYTES = 256 * 2**20
"""Bytes of the larger bodies, and of what they continue, that are read, parsed and admitted at the same time."""
MAX_STORED_BYTES = 128 * 2**20
"""Bytes of the larger answers from the store that are sent at the same time, and of inputs that wait to be stored."""


class ByteBudget:
    """The bytes that one process may hold for one purpose, of which an API key may take half.

    What is larger than that is let in alone.
    """

    def __init__(self, max_bytes: int, what: str) -> None:
        """Set the bound; `what` names in the plural what is held, for messages."""
        self.max_bytes = max_bytes
        self.what = what
        self.used = 0
        self.used_by: dict[str, int] = {}
        """The bytes of each owner that holds some."""

    def reservation(self, owner: str = "") -> "Reservation":
        """Return an empty reservation for one request.

        Requests of a server without API keys have the owner "", which may take all.
        """
        return Reservation(self, owner)


class Reservation:
    """The bytes of a budget that one request holds.

    They are returned at the end of its `with` block.
    """

    def __init__(self, budget: ByteBudget, owner: str) -> None:
        self._budget = budget
        self._owner = owner
        self._held = 0

    def grow(self, size: int) -> None:
        """Extend the reservation to `size` bytes.

        Raises ApiError 429 if the budget, or the owner's half of it, has no room for them. Up to MAX_INLINE_BODY bytes
        are not counted.
        """
        if size <= MAX_INLINE_BODY:
            return
        budget, added = self._budget, size - self._held
        own = budget.used_by.get(self._owner, 0)
        for used, most, whose in (
            (budget.used, budget.max_bytes, ""),
            (own, budget.max_bytes // 2 if self._owner else budget.max_bytes, " of this API key"),
        ):
            if used + added > most and used > self._held:
                raise overloaded(
                    f"{budget.what}{whose} take {used} bytes, at most {most} are allowed at once; try again later",
                    refusal="bodies",
                )
        self._add(added)

    def release(self) -> None:
        """Return the bytes; idempotent."""
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
