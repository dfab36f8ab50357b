"""The owner of what a request stores."""

from starlette.types import Scope

OWNER_KEY = "tandem.owner"
"""Key of the owner's name in the ASGI scope of a request."""


def owner_of(scope: Scope) -> str:
    """Return the name of the owner.

    All requests of a server without API keys have the same one.
    """
    owner: str = scope.get(OWNER_KEY, "")
    return owner
