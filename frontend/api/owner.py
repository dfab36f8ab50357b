"""The owner of what a request stores."""

from starlette.types import Scope

from tandem.frontend.access.api_key import api_key


def owner_of(scope: Scope) -> str:
    """Return the name of the owner.

    All requests of a server without API keys have the same one.
    """
    key = api_key(scope)
    return "" if key is None else key.owner
