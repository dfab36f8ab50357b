"""All listening sockets of a service: those of each frontend's slot."""

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
"""Seconds for which an address that is in use is waited for."""
_HANDOVER_POLL_SECONDS = 0.1

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

T = TypeVar("T")


class Addresses(Struct, frozen=True):
    """Addresses that the user wants a service to have."""

    hosts: Sequence[str] = ()
    port: int | None = None
    uds: Path | None = None
    """Path of a Unix socket; without hosts and a port, a service with one has no other address."""
    uds_mode: int = 0o600
    """Permissions of its file."""

    @property
    def tcp_hosts(self) -> Sequence[str]:
        """The hosts to listen on, none for a service with a Unix socket alone."""
        return self.hosts or (() if self.uds is not None and self.port is None else (DEFAULT_HOST,))

    @property
    def tcp_port(self) -> int:
        return DEFAULT_PORT if self.port is None else self.port


class ServiceSockets(Struct, frozen=True):
    """Listening sockets of a service.

    Each slot has its own sockets of TCP addresses, among which the kernel spreads connections. A Unix socket is one for
    all slots, since only one can have its path: whoever accepts first has the connection.
    """

    slots: tuple[tuple[socket.socket, ...], ...]

    @property
    def all(self) -> list[socket.socket]:
        """Each socket once."""
        return list(dict.fromkeys(sock for slot in self.slots for sock in slot))

    @property
    def tcp_hosts(self) -> list[str]:
        """Addresses that are listened on, in numbers, without Unix sockets."""
        return [sock.getsockname()[0] for slot in self.slots[:1] for sock in slot if sock.family != socket.AF_UNIX]

    def descriptors(self) -> list[list[int]]:
        """Return the file descriptors of each slot."""
        return [[sock.fileno() for sock in slot] for slot in self.slots]

    def urls(self, is_tls: bool) -> list[str]:
        """Return the URL of each address.

        A Unix socket has no TLS: its permissions say who may connect.
        """
        return [url_of(sock, "https" if is_tls else "http") for slot in self.slots[:1] for sock in slot]

    @classmethod
    def open(cls, addresses: Addresses, count: int, stack: ExitStack) -> "ServiceSockets":
        """Open the sockets of `count` slots until the end of the stack.

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
    """Return what `use` returns, which needs an address.

    Try it again for a while if the address is in use: the processes of a supervisor that was killed hold its addresses
    for a moment longer than it runs.
    """
    for _ in range(round(HANDOVER_SECONDS / _HANDOVER_POLL_SECONDS)):
        with suppress(AddressInUseError):
            return use()
        time.sleep(_HANDOVER_POLL_SECONDS)
    return use()
