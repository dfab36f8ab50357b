"""The names under which a server offers its model."""

from msgspec import Struct

from tandem.frontend.errors import ApiError
from tandem.protocol.engine_options import ANY_NAME

MAX_SHOWN_CHARS = 100
"""Characters of an unknown name that its error repeats."""


class ServedNames(Struct, frozen=True):
    """The names that requests may give for the model."""

    names: tuple[str, ...] = ()
    """Names given to the server, with ANY_NAME for every other one; without names it is the engine's name."""

    @property
    def accepts_any(self) -> bool:
        return ANY_NAME in self.names

    def listed(self, own: str) -> tuple[str, ...]:
        """Return the names that the server tells.

        `own` is the engine's name of the model.
        """
        return tuple(name for name in self.names if name != ANY_NAME) or (own,)

    def resolve(self, name: str | None, own: str) -> str:
        """Return the name under which a request is answered.

        Without a name, or with an empty one, it is the first of those that are told. Raises ApiError 404 for a name
        that the model does not have.
        """
        listed = self.listed(own)
        if not name:
            return listed[0]
        if name not in listed and not self.accepts_any:
            known = ", ".join([repr(known) for known in listed])
            shown = repr(name[:MAX_SHOWN_CHARS])
            raise ApiError(
                404, f"the model {shown} does not exist; this server has {known}", "model", "model_not_found"
            )
        return name
