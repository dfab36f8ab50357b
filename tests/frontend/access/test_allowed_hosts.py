"""Host headers that are served, and those that are not."""

import pytest

from tandem.frontend.access.allowed_hosts import AllowedHosts, is_address, is_loopback, refusal

LOOPBACK = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:9", "127.3.2.1", "[::1]", "[::1]:8000", ""]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "192.168.0.7",
    "[fe80::1]:1",
    "127.0.0.1.nip.io",
    "[::1].evil.example",
    "[::1]evil.example:80",
    "localhost:80@evil.example",
    "user@localhost",
    "localhost:evil.example",
]


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_serves_its_names_with_any_port(host: str) -> None:
    assert AllowedHosts(["loopback"]).accepts(host)


@pytest.mark.parametrize("host", FOREIGN)
def test_loopback_serves_no_other_name_but_on_a_unix_socket(host: str) -> None:
    assert not AllowedHosts(["loopback"]).accepts(host)
    assert AllowedHosts(["loopback"]).accepts(host, is_unix=True)


@pytest.mark.parametrize(
    ("names", "host", "served"),
    [
        (["*"], "evil.example", True),
        (["api.example.org"], "api.example.org:443", True),
        (["API.example.org,b"], "api.example.org", True),
        (["a, b"], "b:1", True),
        (["a:80"], "a:80", True),
        (["a:80"], "a:81", False),
        (["*.example.org"], "x.y.example.org", True),
        (["*.example.org"], "example.org", False),
        (["*.example.org"], "evilexample.org", False),
        (["a"], "localhost", False),
        (["a", "loopback"], "localhost", True),
        (["[::1]"], "[::1]:8000", True),
    ],
)
def test_given_names_are_served_and_no_others(names: list[str], host: str, served: bool) -> None:
    assert AllowedHosts(names).accepts(host) is served
    if served or names != ["a"]:
        return
    assert not AllowedHosts(names).accepts(host, is_unix=True)


def test_refusal_names_host_and_flag() -> None:
    assert "'evil.example'" in refusal("evil.example") and "--allowed-hosts" in refusal("evil.example")


def test_addresses_are_told_from_names() -> None:
    assert [is_address(host) for host in ("10.0.0.1:8100", "[::1]:1", "engine:8100", "[::1].a")] == [
        True,
        True,
        False,
        False,
    ]
    assert [is_loopback(host) for host in ("127.0.0.2", "::1", "0.0.0.0", "::", "a")] == [
        True,
        True,
        False,
        False,
        False,
    ]
