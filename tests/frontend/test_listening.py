"""URLs of listening sockets, the limit of open files, and the number of connections that follows from it."""

import resource
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.frontend.listening import (
    MAX_CONNECTIONS,
    RESERVED_FILES,
    allowed_connections,
    listen,
    raise_file_limit,
    url_of,
)

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
    listening: Any = SimpleNamespace(getsockname=lambda: ("::1", 8000, 0, 0))
    assert url_of(listening) == "http://[::1]:8000"


def test_address_in_use_is_named_without_its_address() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(OSError, match="Address already in use") as caught:
        listen("127.0.0.1", taken.getsockname()[1])
    assert caught.value.strerror == "Address already in use"
