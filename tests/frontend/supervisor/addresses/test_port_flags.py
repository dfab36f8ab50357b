"""Flags that ask for the same port, told before anything listens."""

import pytest

from tandem.frontend.supervisor.addresses.port_flags import check_ports
from tandem.frontend.supervisor.addresses.service_sockets import Addresses
from tandem.frontend.supervisor.model import LaunchError


@pytest.mark.parametrize(
    ("api", "ops", "endpoint", "message"),
    [
        (Addresses((), 9000), ("127.0.0.1", 9000), None, r"^--port and --ops-port .* 9000 on 127\.0\.0\.1\b"),
        (Addresses(), ("127.0.0.1", 8000), None, r"^--port \(by default\) and --ops-port .* 8000 on 127\.0\.0\.1\b"),
        (Addresses(("0.0.0.0",), 9000), ("127.0.0.2", 9000), None, "both 9000 on 127.0.0.2"),
        (Addresses(("127.0.0.1",), 9000), ("::", 9000), None, "both 9000 on 127.0.0.1"),
        (Addresses(("127.0.0.1", "::1"), 9000), ("::1", 9000), None, "both 9000 on ::1"),
        (Addresses((), 9001), ("127.0.0.1", None), "tcp://*:9000", r"--endpoint \(.* \+ 1\) .* 9001 on\b"),
        (None, ("0.0.0.0", 9000), "tcp://127.0.0.1:9000", r"--ops-port and .*--endpoint .* 9000\b"),
    ],
)
def test_flags_with_one_port_are_named_with_its_number(
    api: Addresses | None, ops: tuple[str, int | None], endpoint: str | None, message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        check_ports(api, *ops, endpoint)


@pytest.mark.parametrize(
    ("api", "ops", "endpoint"),
    [
        (Addresses((), 0), ("127.0.0.1", 0), None),
        (Addresses((), 8100), ("127.0.0.1", None), None),
        (Addresses(("127.0.0.1",), 9000), ("127.0.0.2", 9000), None),
        (Addresses(("::1",), 9000), ("0.0.0.0", 9000), "ipc:///run/engine"),
        (Addresses((), 9000), ("127.0.0.1", 9001), "tcp://nowhere.invalid:9000"),
    ],
)
def test_ports_of_different_addresses_and_free_ports_may_be_equal(
    api: Addresses | None, ops: tuple[str, int | None], endpoint: str | None
) -> None:
    check_ports(api, *ops, endpoint)
