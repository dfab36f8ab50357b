"""Hosts resolved to addresses, and the sockets on them."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tandem.frontend.supervisor.addresses.tcp_address import TcpAddress, listen_tcp, tcp_addresses
from tandem.frontend.supervisor.model import AddressInUseError, LaunchError


@contextmanager
def listening(*hosts: str, port: int = 0, count: int = 1) -> Iterator[list[list[socket.socket]]]:
    with ExitStack() as stack:
        opened = listen_tcp(tcp_addresses(hosts), port, count)
        for sock in (sock for group in opened for sock in group):
            stack.enter_context(sock)
        yield opened


def ports(opened: list[list[socket.socket]]) -> set[int]:
    return {sock.getsockname()[1] for group in opened for sock in group}


def connects(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as client:
        return client.connect_ex((host, port)) == 0


def test_any_address_of_version_6_takes_connections_of_both_versions() -> None:
    with listening("::", count=3) as opened:
        (port,) = ports(opened)
        assert connects("::1", port) and connects("127.0.0.1", port)


def test_any_address_of_version_6_leaves_version_4_to_an_address_of_its_own() -> None:
    with listening("::", "127.0.0.1", count=2) as opened:
        (port,) = ports(opened)
        assert [len(group) for group in opened] == [2, 2]
        assert connects("::1", port) and connects("127.0.0.1", port) and not connects("127.0.0.2", port)


def test_several_hosts_share_one_free_port() -> None:
    with listening("127.0.0.1", "127.0.0.2", "[::1]", count=2) as opened:
        (port,) = ports(opened)
        assert all(connects(host, port) for host in ("127.0.0.1", "127.0.0.2", "::1"))


def test_name_stands_for_all_its_addresses_of_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(family, socket.SOCK_STREAM, 6, "", (host, 0)) for family, host in
            ((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "127.0.0.1"))]  # fmt: skip
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert tcp_addresses(["localhost"]) == [TcpAddress("::1", "localhost"), TcpAddress("127.0.0.1", "localhost")]


def test_address_that_a_name_has_and_the_machine_lacks_is_left_out() -> None:
    found = [TcpAddress("192.0.2.1", "web"), TcpAddress("127.0.0.1", "web")]
    (opened,) = listen_tcp(found, 0, 1)
    with opened[0] as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    with pytest.raises(LaunchError, match=r"192\.0\.2\.1:0\b.*--host\b"):
        listen_tcp(found[:1], 0, 1)


def test_address_in_use_is_named_and_frees_the_others() -> None:
    with listening("127.0.0.1") as opened:
        (port,) = ports(opened)
        with pytest.raises(AddressInUseError, match=rf"127\.0\.0\.1:{port}\b.*--port\b"):
            listen_tcp(tcp_addresses(["127.0.0.2", "127.0.0.1"]), port, 2)
        assert not connects("127.0.0.2", port)
    with listening("::1") as opened:
        (port,) = ports(opened)
        with pytest.raises(AddressInUseError, match=rf"\[::1\]:{port}\b"):
            listen_tcp(tcp_addresses(["::1"]), port, 1)


def test_unknown_host_is_named_with_its_flag() -> None:
    with pytest.raises(LaunchError, match=r"\bnowhere\.invalid\b.*--ops-host\b"):
        tcp_addresses(["nowhere.invalid"], "--ops-host")
