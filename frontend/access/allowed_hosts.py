"""Allowed values of the Host header.

With DNS rebinding, a page on another site can point its own name at this machine and then read responses of a server
that its browser reaches. The Host header still has the name of that page.
"""

import ipaddress
import re
from collections.abc import Iterable

ANY = "*"
UNIX = "unix"
"""Address of a client on a Unix socket, and its name in `--forwarded-allow-ips`."""
LOOPBACK = "loopback"
"""Allows `localhost` and loopback addresses, and any name on a Unix socket, which browsers cannot reach."""

_HOST = re.compile(r"(\[[^\[\]]+\]|[^\[\]:@]+)(?::[0-9]*)?")
"""Matches a name, or an address with or without brackets, and an optional port."""


class AllowedHosts:
    """Allowed host names.

    Each entry is `*`, `loopback`, a name or address with an optional port, or `*.DOMAIN`.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.strip().lower() for given in names for name in given.split(",") if name.strip())
        self._domains = tuple(name[1:] for name in self._names if name.startswith("*."))

    @property
    def allows_any(self) -> bool:
        """True if all hosts are allowed."""
        return ANY in self._names

    def accepts(self, header: str, is_unix: bool = False) -> bool:
        """Return True for an allowed Host header.

        A request without the header is allowed, since it does not come from a browser.
        """
        host, bare = header.strip().lower(), _without_port(header.strip().lower())
        if self.allows_any or not host or host in self._names or bare in self._names:
            return True
        if bare.endswith(self._domains):
            return True
        return LOOPBACK in self._names and (is_unix or bare == "localhost" or is_loopback(bare))


def refusal(header: str) -> str:
    """Return the error message for a host that is not allowed."""
    return f"requests for the host {header[:200]!r} are not served; add it to --allowed-hosts, or give * for all"


def is_address(host: str) -> bool:
    """Return True if a Host header is an IP address.

    Such a header cannot result from DNS rebinding.
    """
    return _address(_without_port(host)) is not None


def is_loopback(host: str) -> bool:
    """Return True for a loopback address, with or without brackets."""
    found = _address(host)
    return found is not None and found.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def _without_port(host: str) -> str:
    """Return a host without port and without the trailing dot of a fully qualified name.

    Return "" for an invalid value.
    """
    found = _HOST.fullmatch(host)
    return "" if found is None else found[1].removesuffix(".")
