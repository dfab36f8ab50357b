"""Versions: of the wire, checked in the handshake, and of the distribution."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

PROTOCOL_VERSION = 1
"""Raised whenever a peer of the previous version could misread a message. Fields are only ever appended."""


@cache
def distribution_version() -> str:
    """The installed version of `tandem-llm`, or "unknown" in a source tree that was never installed.

    Looked up once: every reply names it, and the look-up reads and parses a file.
    """
    try:
        return version("tandem-llm")
    except PackageNotFoundError:
        return "unknown"
