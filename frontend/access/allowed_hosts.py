"""Names that the Host header of a request may have.

A page on another site can point a name of its own at this machine (DNS rebinding) and then read the answers of a server
that its browser reaches; the Host header still has that page's name.
"""

import ipaddress
import re
from collections.abc import Iterable

ANY = "*"
LOOPBACK = "loopback"
"""Stands for `localhost` and all loopback addresses, and for any name on a Unix socket, which no browser reaches."""

_HOST = re.compile(r"(\[[^\[\]]+\]|[^\[\]:@]+)(?::[0-9]*)?")
"""A name, or an address in brackets or not, and a port if there is one."""


class AllowedHosts:
    """Names that are served.

    Each is `*`, `loopback`, a name or an address with or without a port, or a domain after `*.`.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.strip().lower() for given in names for name in given.split(",") if name.strip())
        self._domains = tuple(name[1:] for name in self._names if name.startswith("*."))

    @property
    def allows_any(self) -> bool:
        """True if nothing is refused."""
        return ANY in self._names

    def accepts(self, header: str, is_unix: bool = False) -> bool:
        """Tell whether a request with this Host header is served.

        One without the header is not from a browser, and is.
        """
        host, bare = header.strip().lower(), _without_port(header.strip().lower())
        if self.allows_any or not host or host in self._names or bare in self._names:
            return True
        if bare.endswith(self._domains):
            return True
        return LOOPBACK in self._names and (is_unix or bare == "localhost" or is_loopback(bare))


def refusal(header: str) -> str:
    """Return the message of a request whose host is not served."""
    return f"requests for the host {header[:200]!r} are not served; add it to --allowed-hosts, or give * for all"


def is_address(host: str) -> bool:
    """Tell whether a Host header has an address.

    No DNS rebinding can bring that about.
    """
    return _address(_without_port(host)) is not None


def is_loopback(host: str) -> bool:
    """Tell whether an address, in brackets or not, is one of the loopback."""
    found = _address(host)
    return found is not None and found.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def _without_port(host: str) -> str:
    """Return a host without its port, and without the dot at the end of a full name.

    It is "" for a text of another form.
    """
    found = _HOST.fullmatch(host)
    return "" if found is None else found[1].removesuffix(".")
