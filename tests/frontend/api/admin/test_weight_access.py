"""Which clients count as those of this host."""

from typing import Any

import pytest
from fastapi import Request

from tandem.frontend.api.admin.weight_access import is_local
from tandem.frontend.server.hosts import trust_proxies

PEERS = [
    (("127.0.0.1", 1), True),
    (("127.9.9.9", 1), True),
    (("::1", 1), True),
    (("::ffff:127.0.0.1", 1), True),
    (("", 0), True),
    (("unix", 0), True),
    (None, True),
    (("10.0.0.1", 1), False),
    (("::ffff:10.0.0.1", 1), False),
    (("localhost.example", 1), False),
]


@pytest.mark.parametrize(("peer", "expected"), PEERS)
def test_a_client_is_local_by_its_address(peer: Any, expected: bool) -> None:
    assert is_local(Request({"type": "http", "client": peer, "headers": []})) is expected


@pytest.mark.parametrize("trusted", [None, ["*"], ["127.0.0.1"], ["unix"], ["10.0.0.1", "127.0.0.1", "unix"]])
@pytest.mark.parametrize(("peer", "is_near"), PEERS)
@pytest.mark.parametrize(
    ("forwarded", "expected"),
    [
        ([], True),
        (["127.0.0.1"], True),
        (["127.0.0.1, ::1"], True),
        (["127.0.0.1", "::1"], True),
        (["8.8.8.8"], False),
        (["8.8.8.8, 127.0.0.1"], False),
        (["127.0.0.1, 8.8.8.8"], False),
        (["127.0.0.1", "8.8.8.8"], False),
        (["unix"], False),
        (["localhost"], False),
        ([""], False),
    ],
)
def test_no_header_makes_a_client_local(
    trusted: list[str] | None, peer: Any, is_near: bool, forwarded: list[str], expected: bool
) -> None:
    seen: list[bool] = []

    async def app(scope: Any, *_: Any) -> None:
        seen.append(is_local(Request(scope)))

    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded]
    scope = {"type": "http", "client": peer, "scheme": "http", "headers": headers}
    unused: Any = None
    run = app if trusted is None else trust_proxies(app, trusted)
    with pytest.raises(StopIteration):
        run(scope, unused, unused).__await__().__next__()
    assert seen == [is_near and expected]
