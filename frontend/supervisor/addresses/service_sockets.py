"""Listening sockets of a service, by frontend slot."""

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from tandem.frontend.listening import url_of
from tandem.frontend.supervisor.addresses.tcp_address import listen_tcp, tcp_addresses
from tandem.frontend.supervisor.addresses.unix_socket import listening_unix_socket
from tandem.frontend.supervisor.model import AddressInUseError

HANDOVER_SECONDS = 3.0
"""Seconds to wait for an address that is in use."""
_HANDOVER_POLL_SECONDS = 0.1

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

T = TypeVar("T")


class Addresses(Struct, frozen=True):
    """Addresses that the user asked for."""

    hosts: Sequence[str] = ()
    port: int | None = None
    uds: Path | None = None
    """Path of a Unix socket; the only address of a service unless hosts or a port are given."""
    uds_mode: int = 0o600
    """Permissions of the socket file."""

    @property
    def tcp_hosts(self) -> Sequence[str]:
        """Hosts to listen on; empty for a service with a Unix socket alone."""
        return self.hosts or (() if self.uds is not None and self.port is None else (DEFAULT_HOST,))

    @property
    def tcp_port(self) -> int:
        return DEFAULT_PORT if self.port is None else self.port


class ServiceSockets(Struct, frozen=True):
    """Listening sockets of a service.

    Each slot has its own TCP sockets, among which the kernel distributes connections (SO_REUSEPORT). A Unix socket is
    shared by all slots, since only one socket can be bound to its path: the first process to accept gets the
    connection.
    """

    slots: tuple[tuple[socket.socket, ...], ...]

    @property
    def all(self) -> list[socket.socket]:
        """All sockets without duplicates."""
        return list(dict.fromkeys(sock for slot in self.slots for sock in slot))

    @property
    def tcp_hosts(self) -> list[str]:
        """Numeric TCP addresses to listen on."""
        return [sock.getsockname()[0] for slot in self.slots[:1] for sock in slot if sock.family != socket.AF_UNIX]

    def descriptors(self) -> list[list[int]]:
        """Return the file descriptors of each slot."""
        return [[sock.fileno() for sock in slot] for slot in self.slots]

    def urls(self, is_tls: bool) -> list[str]:
        """Return the URL of each address.

        A Unix socket has no TLS; access is controlled by its permissions.
        """
        return [url_of(sock, "https" if is_tls else "http") for slot in self.slots[:1] for sock in slot]

    @classmethod
    def open(cls, addresses: Addresses, count: int, stack: ExitStack) -> "ServiceSockets":
        """Open the sockets of `count` slots; the stack closes them.

        Raises LaunchError if an address cannot be listened on.

        """
        groups: list[list[socket.socket]] = []
        if addresses.tcp_hosts:
            resolved = tcp_addresses(addresses.tcp_hosts)
            groups = once_free(lambda: listen_tcp(resolved, addresses.tcp_port, count))
            for sock in (sock for group in groups for sock in group):
                stack.enter_context(sock)
        if (path := addresses.uds) is not None:
            mode = addresses.uds_mode
            shared = once_free(lambda: stack.enter_context(listening_unix_socket(path, mode)))
            groups.append([shared] * count)
        return cls(tuple(zip(*groups, strict=True)))


def once_free(use: Callable[[], T]) -> T:
    """Call `use`, which needs an address, and return its result.

    Retry for a while if the address is in use: child processes of a killed supervisor hold its addresses a moment
    longer than it runs.
    """
    for _ in range(round(HANDOVER_SECONDS / _HANDOVER_POLL_SECONDS)):
        with suppress(AddressInUseError):
            return use()
        time.sleep(_HANDOVER_POLL_SECONDS)
    return use()
