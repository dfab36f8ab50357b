"""Addresses of this host."""

from tests.support.gloo_trainer import open_port


def get_ip() -> str:
    return "127.0.0.1"


def get_open_port() -> int:
    return open_port()
