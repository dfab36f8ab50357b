"""Listen on TCP addresses, and name the process that uses a port."""

import errno
import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from tandem.frontend.listening import listen_shared
from tandem.frontend.supervisor.model import AddressInUseError, LaunchError

_LISTENING = "0A"
"""State of listening sockets in /proc/net/tcp."""


class PortInUseError(AddressInUseError):
    """A port is used by another process.

    The process is looked up when the message is read, because a start may retry many times or try many ports.
    """

    def __init__(self, port: int, before: str, after: str) -> None:
        """Store the message before and after the name of the process."""
        super().__init__(before, after)
        self.port = port

    def __str__(self) -> str:
        before, after = self.args
        return f"{before} {port_owner(self.port)}{after}"


def port_owner(port: int, proc: Path = Path("/proc")) -> str:
    """Return the name and id of the process that listens on a port.

    "another process" if it cannot be determined: it belongs to another user or container.
    """
    sockets = {f"socket:[{inode}]" for inode in _inodes(port, proc)}
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):
            if any(str(link.readlink()) in sockets for link in (process / "fd").iterdir()):
                name = (process / "comm").read_bytes().strip().decode(errors="replace")
                shown = "".join(character if character.isprintable() else "?" for character in name)
                return f"{shown} (process {process.name})"
    return "another process"


def _inodes(port: int, proc: Path) -> set[str]:
    """Return the inodes of sockets that listen on a port."""
    found = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found


_MISSING = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Error numbers of an address that this machine lacks."""
_PORT_TRIES = 10
"""Free ports to try until one is free on all of several addresses."""


class TcpAddress(Struct, frozen=True):
    """Address of this machine, and the host that it was resolved from."""

    host: str
    """Numeric address without brackets."""
    given: str
    """Host given by the user."""
    is_dual_stack: bool = False
    """True for an IPv6 address that also accepts IPv4."""


def tcp_addresses(hosts: Sequence[str], flag: str = "--host") -> list[TcpAddress]:
    """Resolve hosts to addresses without duplicates; a name may have several.

    `::` includes IPv4 unless an IPv4 address is also given. Raises LaunchError for an unknown host.
    """
    found: dict[str, str] = {}
    for given in hosts:
        try:
            resolved = socket.getaddrinfo(
                given.strip("[]") or "0.0.0.0", None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise LaunchError(f"cannot listen on {given} ({reason}); choose another {flag}") from None
        for family, _, _, _, address in resolved:
            if family in (socket.AF_INET, socket.AF_INET6):
                found.setdefault(str(address[0]), given)
    dual = socket.has_dualstack_ipv6() and all(":" in host for host in found)
    return [TcpAddress(host, given, dual and host == "::") for host, given in found.items()]


def listen_tcp(
    addresses: Sequence[TcpAddress], port: int, count: int, flag: str = "--port"
) -> list[list[socket.socket]]:
    """Open `count` sockets on each address, all with the same port, 0 for a free one.

    Addresses of a name that this machine lacks are skipped if the name has others. Raises LaunchError if an address
    cannot be used.
    """
    for _ in range(_PORT_TRIES - 1 if port == 0 and len(addresses) > 1 else 0):
        with suppress(AddressInUseError):
            return _listen_tcp(addresses, port, count, flag)
    return _listen_tcp(addresses, port, count, flag)


def _listen_tcp(addresses: Sequence[TcpAddress], port: int, count: int, flag: str) -> list[list[socket.socket]]:
    opened: list[list[socket.socket]] = []
    missing: dict[str, LaunchError] = {}
    heard: set[str] = set()
    try:
        for address in addresses:
            try:
                sockets = listen_shared(address.host, port, count, address.is_dual_stack)
            except OSError as error:
                failure = _failure(address, port, flag, error)
                if error.errno not in _MISSING or _is_number(address.given):
                    raise failure from None
                missing.setdefault(address.given, failure)
                continue
            heard.add(address.given)
            opened.append(sockets)
            port = port or sockets[0].getsockname()[1]
        if unheard := [failure for given, failure in missing.items() if given not in heard]:
            raise unheard[0]
    except LaunchError:
        for sock in (sock for group in opened for sock in group):
            sock.close()
        raise
    return opened


def _failure(address: TcpAddress, port: int, flag: str, error: OSError) -> LaunchError:
    host = f"[{address.host}]" if ":" in address.host else address.host
    other = f"{flag.removesuffix('port')}host" if error.errno in _MISSING else flag
    reason = f"cannot listen on {host}:{port} ({error.strerror or error}"
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(port, f"{reason}, used by", f"); choose another {other}")
    return LaunchError(f"{reason}); choose another {other}")


def _is_number(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return True
    return False
