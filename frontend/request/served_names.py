"""Names under which a server offers its model."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Protocol

from msgspec import Struct

from tandem.frontend.errors import ApiError
from tandem.protocol.engine_options import ANY_NAME

MAX_SHOWN_CHARS = 100
"""Maximum characters of an unknown name in an error message."""
MAX_LISTED = 20
"""Maximum number of known names in such a message."""


class Adapters(Protocol):
    """Names of adapters."""

    def __contains__(self, name: object, /) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...


class ServedNames(Struct, frozen=True):
    """Model names that requests may use."""

    names: tuple[str, ...] = ()
    """Names given to the server, and ANY_NAME if any is accepted; by default the engine's name."""

    @property
    def accepts_any(self) -> bool:
        return ANY_NAME in self.names

    def listed(self, own: str) -> tuple[str, ...]:
        """Return the names listed in `/v1/models`.

        own: the engine's name of the model.
        """
        return tuple(name for name in self.names if name != ANY_NAME) or (own,)

    def resolve(self, name: str | None, own: str, adapters: Adapters = ()) -> str:
        """Return the model name for the response.

        The first listed name is the default. adapters: further names. Raises ApiError 404 for an unknown name.
        """
        listed = self.listed(own)
        if not name:
            return listed[0]
        if name not in listed and name not in adapters and not self.accepts_any:
            known = ", ".join([repr(known) for known in islice(chain(listed, adapters), MAX_LISTED)])
            shown = repr(name[:MAX_SHOWN_CHARS])
            raise ApiError(
                404, f"the model {shown} does not exist; this server has {known}", "model", "model_not_found"
            )
        return name
