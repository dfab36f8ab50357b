"""The addresses that flags ask for, and the sockets of each slot."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import pytest

from tandem.frontend.supervisor.addresses.service_sockets import Addresses, ServiceSockets

PATH = Path("/run/api")


@pytest.mark.parametrize(
    ("addresses", "hosts", "port"),
    [
        (Addresses(), ("127.0.0.1",), 8000),
        (Addresses((), 9), ("127.0.0.1",), 9),
        (Addresses(("::1", "a")), ("::1", "a"), 8000),
        (Addresses((), None, PATH), (), 8000),
        (Addresses((), 9, PATH), ("127.0.0.1",), 9),
        (Addresses(("a",), None, PATH), ("a",), 8000),
    ],
)
def test_unix_socket_takes_the_place_of_the_default_address_alone(
    addresses: Addresses, hosts: Sequence[str], port: int
) -> None:
    assert (tuple(addresses.tcp_hosts), addresses.tcp_port) == (hosts, port)


def test_slots_have_sockets_of_their_own_for_tcp_and_share_a_unix_socket(ipc_dir: Path) -> None:
    path = ipc_dir / "api"
    with ExitStack() as stack:
        found = ServiceSockets.open(Addresses(("127.0.0.1", "::1"), 0, path), 3, stack)
        assert [len(slot) for slot in found.slots] == [3, 3, 3]
        assert len(found.all) == 2 * 3 + 1
        assert len({slot[2] for slot in found.slots}) == 1
        port = found.slots[0][0].getsockname()[1]
        unix = f"http+unix://{quote(str(path), safe='')}"
        assert found.urls(True) == [f"https://127.0.0.1:{port}", f"https://[::1]:{port}", unix]
        assert [len(set(descriptors)) for descriptors in found.descriptors()] == [3, 3, 3]
    assert not path.exists()
    assert ServiceSockets(()).urls(False) == []
