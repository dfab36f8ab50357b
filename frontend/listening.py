"""Listening sockets, their URLs and the limits of their connections.

The sockets are for this process or for a child process that inherits them.
"""

import contextlib
import os
import resource
import socket
from urllib.parse import quote

from msgspec import Struct

MAX_CONNECTIONS = 16384
"""Largest number of connections of one process where neither a flag nor the limit of open files says less."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""
UNIX_SCHEME = "http+unix://"
"""Start of the URL of a Unix socket."""
_MAPPED = "::ffff:"
"""Start of an IPv4 address in the form that a socket for both versions reports."""
RESERVED_FILES = 128
"""Descriptors that are left for everything but connections: logs, the link to the engine, grammar processes."""


class ConnectionLimits(Struct, frozen=True):
    """Limits of connections, which hold before any authentication.

    Times are in seconds, sizes in bytes.
    """

    max_connections: int | None = None
    """Limit on open connections; None for the one that the limit of open files allows."""
    max_headers_size: int = 64 * 1024
    """Limit on the names and values of all headers of a request together."""
    max_headers: int = 128
    """Limit on the number of headers of a request."""
    max_url: int = 16 * 1024
    header_timeout: float = 10.0
    """Time for all headers of a request, or a TLS handshake, to arrive."""
    body_timeout: float = 30.0
    """Time for a body to arrive, to which each received `body_rate` bytes add 1 s."""
    body_rate: int = 16 * 1024
    keep_alive_timeout: float = 75.0
    """Time for which a connection waits for its next request. Longer than proxies keep idle connections, so that this
    side never closes one while a request is on its way."""
    send_timeout: float = 30.0
    """Time after which a client that reads nothing of what waits to be sent is given up."""


def listen(host: str, port: int, dual_stack: bool = False) -> socket.socket:
    """Open a listening socket.

    Port 0 selects a free one. With `dual_stack` an address of IPv6 takes connections of IPv4 too. Raises OSError if the
    address is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=dual_stack)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno is None:
            raise
        # Python adds the address to the reason; messages name it in their own words.
        raise OSError(error.errno, os.strerror(error.errno)) from None


def inherited_socket(descriptor: int) -> socket.socket:
    """Take over a socket from the parent process.

    Children of this process do not inherit it: while one of them held a listening socket, clients would still be
    queued after the last process had stopped accepting.
    """
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    return sock


def listen_shared(host: str, port: int, count: int, dual_stack: bool = False) -> list[socket.socket]:
    """Open `count` listening sockets on one address.

    The kernel spreads connections among them. Raises OSError if the address is in use, also by sockets that would share
    it: the first is bound and listens as the only one before it lets the others in, so that of two servers started by
    mistake, one is refused.
    """
    sockets = [listen(host, port, dual_stack)]
    try:
        if count > 1:
            sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        address = sockets[0].getsockname()
        for _ in range(count - 1):
            sock = socket.socket(sockets[0].family)
            sockets.append(sock)
            # Without SO_REUSEADDR, connections of a server that was killed would keep the address.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if sock.family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual_stack)
            sock.bind(address)
            sock.listen(BACKLOG)
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a listening socket, without a path.

    That of a Unix socket has the path of its file as its host, quoted, and never has TLS.
    """
    if sock.family == socket.AF_UNIX:
        return f"{UNIX_SCHEME}{quote(sock.getsockname(), safe='')}"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def plain_address(host: str) -> str:
    """Return the address of a client as its own network writes it."""
    return host.removeprefix(_MAPPED) if "." in host else host


def raise_file_limit() -> None:
    """Raise this process's limit of open files as far as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems accept no value as large as the one they report; the limit then stays as it is.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def allowed_connections() -> int:
    """Return the number of connections that the limit of open files has room for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    # Half of a limit that is smaller than the reserve.
    return min(MAX_CONNECTIONS, max(soft - RESERVED_FILES, soft // 2))
