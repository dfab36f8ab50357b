"""The id of a request and the API that it uses, from its ASGI scope."""

from starlette.types import Scope

REQUEST_ID_KEY = "tandem.request_id"
"""Key of the scope under which the id of a request is kept."""
ANTHROPIC_PREFIX = "/v1/messages"
ANTHROPIC_VERSION = b"anthropic-version"
"""Header that every client of Anthropic's API sends."""


def request_id(scope: Scope) -> str:
    """Return the id of a request, which the outermost middleware has set."""
    return str(scope.get(REQUEST_ID_KEY, ""))


def speaks_anthropic(scope: Scope) -> bool:
    """Tell whether a request expects answers in the shape of Anthropic's API.

    It does if its path is one of that API alone, or if it has the header `anthropic-version`.
    """
    path: str = scope.get("path", "")
    if path == ANTHROPIC_PREFIX or path.startswith(ANTHROPIC_PREFIX + "/"):
        return True
    return any(name == ANTHROPIC_VERSION for name, _ in scope.get("headers", ()))
