"""Addresses of this host."""

from tests.support.serving import free_port


def get_ip() -> str:
    return "127.0.0.1"


def get_open_port() -> int:
    return free_port()
