"""Owner of the objects that a request stores."""

from starlette.types import Scope

from tandem.frontend.access.api_key import api_key


def owner_of(scope: Scope) -> str:
    """Return the name of the owner.

    Without API keys, all requests have the same owner.
    """
    key = api_key(scope)
    return "" if key is None else key.owner
