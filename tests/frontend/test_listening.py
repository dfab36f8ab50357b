"""URLs of listening sockets, the limit of open files, and the number of connections that follows from it."""

import errno
import itertools
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.frontend.listening import (
    MAX_CONNECTIONS,
    RESERVED_FILES,
    allowed_connections,
    listen,
    listen_shared,
    raise_file_limit,
    url_of,
)
from tests.support.serving import free_port

IN_USE = os.strerror(errno.EADDRINUSE)
RAISE = """
import resource
from tandem.frontend.listening import allowed_connections, raise_file_limit
raise_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE), allowed_connections())
"""


def test_soft_limit_is_raised_to_the_hard_one() -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 1000))

    done = subprocess.run([sys.executable, "-c", RAISE], preexec_fn=lower, capture_output=True, text=True, check=True)
    assert done.stdout == f"(1000, 1000) {1000 - RESERVED_FILES}\n"


def test_limit_that_cannot_be_raised_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


@pytest.mark.parametrize(
    ("files", "connections"),
    [(1024, 1024 - RESERVED_FILES), (64, 32), (200, 100), (10**6, MAX_CONNECTIONS),
     (resource.RLIM_INFINITY, MAX_CONNECTIONS)],
)  # fmt: skip
def test_connections_leave_descriptors_for_the_rest(
    files: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, resource.RLIM_INFINITY))
    assert allowed_connections() == connections


def test_url_names_scheme_address_and_port() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert (url_of(sock), url_of(sock, "https")) == (f"http://127.0.0.1:{port}", f"https://127.0.0.1:{port}")


def test_url_has_brackets_around_an_address_of_version_6() -> None:
    listening: Any = SimpleNamespace(family=socket.AF_INET6, getsockname=lambda: ("::1", 8000, 0, 0))
    assert url_of(listening) == "http://[::1]:8000"


def test_address_in_use_is_named_without_its_address() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(OSError, match=IN_USE) as caught:
        listen("127.0.0.1", taken.getsockname()[1])
    assert (caught.value.errno, caught.value.strerror) == (errno.EADDRINUSE, IN_USE)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0"])
@pytest.mark.parametrize("count", [1, 4])
def test_shared_sockets_have_one_address_and_each_gets_connections(host: str, count: int) -> None:
    with ExitStack() as stack:
        sockets = [stack.enter_context(sock) for sock in listen_shared(host, 0, count)]
        assert len({sock.getsockname() for sock in sockets}) == 1
        port = sockets[0].getsockname()[1]
        target = "127.0.0.1" if host == "0.0.0.0" else host
        # With 200 connections, the chance that a socket of four gets none is 1e-24.
        for _ in range(200):
            stack.enter_context(socket.create_connection((target, port)))
        readable, _, _ = select.select(sockets, [], [], 30)
        assert len(readable) == count


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("second", [1, 3])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_shared_address_is_refused_to_a_second_server(first: int, second: int, host: str) -> None:
    with ExitStack() as stack:
        sockets = [stack.enter_context(sock) for sock in listen_shared("127.0.0.1", 0, first)]
        with pytest.raises(OSError, match=IN_USE) as refusal:
            listen_shared(host, sockets[0].getsockname()[1], second)
        assert refusal.value.errno == errno.EADDRINUSE


def test_of_many_servers_that_start_at_once_on_one_port_one_is_let_in() -> None:
    port, barrier = free_port(), threading.Barrier(8)

    def start() -> list[socket.socket]:
        barrier.wait(30)
        try:
            return listen_shared("127.0.0.1", port, 4)
        except OSError:
            return []

    for _ in range(20):
        with ThreadPoolExecutor(8) as pool:
            started = [future.result() for future in [pool.submit(start) for _ in range(8)]]
        assert sum(map(bool, started)) == 1
        for sock in itertools.chain(*started):
            sock.close()


def test_address_is_free_again_though_connections_of_the_former_server_linger() -> None:
    sockets = listen_shared("127.0.0.1", 0, 2)
    address = sockets[0].getsockname()
    with socket.create_connection(address):
        readable, _, _ = select.select(sockets, [], [], 30)
        accepted = readable[0].accept()[0]
        for sock in sockets:
            sock.close()
        accepted.close()
        for sock in listen_shared(*address, 2):
            sock.close()
