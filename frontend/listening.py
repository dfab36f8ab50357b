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
"""Default maximum of connections per process; a flag or the limit of open files may lower it."""
BACKLOG = 2048
"""Backlog: connections that may wait to be accepted."""
UNIX_SCHEME = "http+unix://"
"""Prefix of the URL of a Unix socket."""
_MAPPED = "::ffff:"
"""Prefix of an IPv4 address on a dual-stack socket."""
RESERVED_FILES = 128
"""File descriptors reserved for everything but connections: logs, the link to the engine, grammar processes."""


class ConnectionLimits(Struct, frozen=True):
    """Limits of connections, enforced before authentication.

    Times are in seconds, sizes in bytes.

    """

    max_connections: int | None = None
    """Maximum number of open connections; None to derive it from the limit of open files."""
    max_headers_size: int = 64 * 1024
    """Maximum bytes of all header names and values of a request."""
    max_headers: int = 128
    """Maximum number of headers of a request."""
    max_url: int = 16 * 1024
    header_timeout: float = 10.0
    """Seconds for all headers of a request, or a TLS handshake, to arrive."""
    body_timeout: float = 30.0
    """Seconds for a body to arrive, plus 1 s for each `body_rate` bytes received."""
    body_rate: int = 16 * 1024
    keep_alive_timeout: float = 75.0
    """Seconds that an idle connection is kept open. Longer than proxies keep idle connections, so that this side does
    not close one while a request is in flight."""
    send_timeout: float = 30.0
    """Seconds after which a client that does not read the response is disconnected."""


def listen(host: str, port: int, dual_stack: bool = False) -> socket.socket:
    """Open a listening socket.

    Port 0 selects a free one. With `dual_stack` an IPv6 address accepts IPv4 as well. Raises OSError if the address is
    in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=dual_stack)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno is None:
            raise
        # Python adds the address to the reason, which messages have already.
        raise OSError(error.errno, os.strerror(error.errno)) from None


def inherited_socket(descriptor: int) -> socket.socket:
    """Take over a socket inherited from the parent process.

    It is not inherited further: while a child held a listening socket, clients would be queued after the last process
    stopped accepting.
    """
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    return sock


def listen_shared(host: str, port: int, count: int, dual_stack: bool = False) -> list[socket.socket]:
    """Open `count` listening sockets on one address.

    The kernel distributes connections among them. Raises OSError if the address is in use, even by sockets that would
    share it: the first socket is bound and listens exclusively before it admits the others, so that of two servers
    started by mistake, one is refused.
    """
    sockets = [listen(host, port, dual_stack)]
    try:
        if count > 1:
            sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        address = sockets[0].getsockname()
        for _ in range(count - 1):
            sock = socket.socket(sockets[0].family)
            sockets.append(sock)
            # Without SO_REUSEADDR, connections of a killed server would block the address.
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

    The URL of a Unix socket has its quoted path as host, and never has TLS.
    """
    if sock.family == socket.AF_UNIX:
        return f"{UNIX_SCHEME}{quote(sock.getsockname(), safe='')}"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def plain_address(host: str) -> str:
    """Return the address of a client, IPv4 without the IPv6 prefix."""
    return host.removeprefix(_MAPPED) if "." in host else host


def raise_file_limit() -> None:
    """Raise this process's limit of open files as far as allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems reject the maximum that they report; the limit is then unchanged.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def allowed_connections() -> int:
    """Return the number of connections that the limit of open files allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    # Half of a limit that is below the reserve.
    return min(MAX_CONNECTIONS, max(soft - RESERVED_FILES, soft // 2))
