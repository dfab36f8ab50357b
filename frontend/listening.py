"""Listening sockets, for this process or for a child process that inherits them."""

import socket


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Port 0 selects a free one. Raises OSError if the address is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)
