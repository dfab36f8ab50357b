"""Listening sockets, for this process or for a child that inherits them."""

import socket


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError where the address is taken. Port 0 takes any."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)
