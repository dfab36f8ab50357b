"""Responses for tests of stores."""

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from tandem.frontend.store.store import StoredItem, StoredResponse


def stored(
    response_id: str,
    previous: str | None = None,
    said: Sequence[str] = ("q",),
    answered: Sequence[str] = ("a",),
    size: int = 0,
) -> StoredResponse:
    """Make a response whose items are named after it; each has `size` bytes beside its name."""

    def items(names: Sequence[str]) -> tuple[StoredItem, ...]:
        return tuple(
            StoredItem(f"{response_id}-{name}", f"{response_id}-{name}".encode().ljust(size)) for name in names
        )

    return StoredResponse(response_id, f"body of {response_id}".encode(), items(said), items(answered), previous)


def retrieved(*arguments: Any, **fields: Any) -> StoredResponse:
    """Make the same response as the store returns it: without its input."""
    return structs.replace(stored(*arguments, **fields), input=())
