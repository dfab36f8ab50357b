"""Addresses of servers as --url takes them."""

import pytest

from tandem.frontend.cli.server_address import base_url, server_url, shown_url, unix_path

UNIX = "http+unix://%2Frun%2Fapi.sock"


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://host:8000/v1", "http://host:8000"),
        ("https://host/", "https://host"),
        ("HTTP://host:8000/", "http://host:8000"),
        ("http+unix:///run/api.sock", UNIX),
        ("http+unix:///run/api.sock/v1/", UNIX),
        (UNIX, UNIX),
        ("host:8000", "http://host:8000"),
        ("127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("localhost", "http://localhost"),
        ("my-host.example.org/tandem", "http://my-host.example.org/tandem"),
    ],
)
def test_url_of_a_server_is_brought_to_one_form(given: str, url: str) -> None:
    assert server_url(given) == url


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("", "HOST:PORT or .*http://"),
        ("8000", "HOST:PORT or .*http://"),
        (":8000", "HOST:PORT"),
        ("host:80x0", "'http://host:80x0'"),
        ("host:99999", "port of"),
        ("http:/host:8000", "HOST:PORT"),
        ("one two:80", "HOST:PORT"),
        ("/run/api.sock", "HOST:PORT"),
        ("ftp://x", "HOST:PORT"),
        ("http+unix://api.sock", "absolute path"),
        ("http://", "port of"),
        ("http://host:80x0", "'http://host:80x0' .*http://HOST:PORT$"),
        ("http://host:99999", "port of"),
        ("http://[::1", "port of"),
        ("http://one two", "port of"),
    ],
)
def test_other_addresses_are_refused(given: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        server_url(given)


def test_unix_socket_has_a_path_and_a_base_of_its_own() -> None:
    assert (unix_path(UNIX), base_url(UNIX)) == ("/run/api.sock", "http://localhost")
    assert (unix_path("http://host"), base_url("http://host")) == (None, "http://host")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:secret@host:8000/v1", "http://user:***@host:8000/v1"),
        ("https://:secret@host", "https://:***@host"),
        ("http://user:se@cret:x@host", "http://user:***@host"),
        ("ftp://user:secret@host", "ftp://user:***@host"),
        ("user:secret@host:8000", "user:***@host:8000"),
        ("http:/user:secret@host", "http:/user:***@host"),
        ("http://user@host:8000", "http://user@host:8000"),
        ("http://host:8000/a:b@c", "http://host:8000/a:b@c"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        (UNIX, UNIX),
    ],
)
def test_shown_url_hides_only_a_password(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "ftp://user:secret@host",
        "user:secret@host",
        "user:secret/x@host",
        "http:/user:secret@host",
        "http://user:secret@host:port",
        "http://user:secret/@host",
    ],
)
def test_refused_address_does_not_repeat_its_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"http|port|host") as refused:
        server_url(url)
    assert "secret" not in str(refused.value)
