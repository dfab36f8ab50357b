"""Versions of the wire protocol and of the distribution.

The handshake checks the protocol's version.
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

PROTOCOL_VERSION = 3
"""Wire protocol version, increased whenever an older peer could misread a message. Fields are only appended."""


def protocol_remedy(frontend: int, engine: int) -> str:
    """Return which side to upgrade if both speak different versions of the protocol."""
    return f"upgrade tandem-llm on the host of the {'frontend' if frontend < engine else 'engine'}"


@cache
def distribution_version() -> str:
    """Return the installed version of `tandem-llm`, or "unknown".

    It is unknown in a source tree that was never installed. Cached, because every response names it and the lookup
    reads and parses a file.
    """
    try:
        return version("tandem-llm")
    except PackageNotFoundError:
        return "unknown"
