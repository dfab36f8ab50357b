"""Request fields without effect on the response."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from tandem.frontend.errors import ApiError, renamed

IGNORED_HEADER = "x-tandem-ignored"
"""Response header with the names of fields without effect, separated by commas."""
IGNORED_KEY = "tandem.ignored_fields"
"""Key of the ASGI scope that holds the IgnoredFields of a request."""
MAX_HEADER_NAMES = 16
MAX_HEADER_BYTES = 512
MAX_RECORDED = 64
"""Maximum number of fields recorded per request."""
_MAX_PATH_CHARS = 100

_INDEX = re.compile(r"\[\d+\]")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.$\[\]-]")


class IgnoredFields:
    """Recorder of the fields of a request that have no effect.

    With `refuse`, such a field is an error instead (`--unknown-fields refuse`). names: the route's names of fields that
    are recorded under another name.
    """

    def __init__(self, refuse: bool = False, names: Mapping[str, str] = MappingProxyType({})) -> None:
        self.refuse = refuse
        self._names = names
        self._paths: dict[str, None] = {}

    @property
    def paths(self) -> tuple[str, ...]:
        """Recorded paths without duplicates.

        Without indices, for example `messages[].cache_control`.
        """
        return tuple(self._paths)

    def add(self, path: str) -> None:
        """Record a field by its path in the body.

        Raises ApiError 400 if such fields are refused.
        """
        path = renamed(path, self._names)
        if self.refuse:
            raise unknown_field(path)
        if len(self._paths) < MAX_RECORDED:
            self._paths[_INDEX.sub("[]", path[:_MAX_PATH_CHARS])] = None

    def header(self) -> bytes:
        """Return the value of IGNORED_HEADER; empty if every field has an effect.

        It has at most MAX_HEADER_NAMES names and MAX_HEADER_BYTES bytes. Unusual characters are replaced by
        underscores, since clients choose the names.
        """
        value = ""
        for path in self.paths[:MAX_HEADER_NAMES]:
            longer = f"{value},{_UNSAFE.sub('_', path)}" if value else _UNSAFE.sub("_", path)
            if len(longer) > MAX_HEADER_BYTES:
                break
            value = longer
        return value.encode()


def unknown_field(path: str) -> ApiError:
    """Return the 400 for an unknown field."""
    return ApiError(400, "the field {param} is not supported", path[:_MAX_PATH_CHARS], "unknown_parameter")
