"""Notifications to a service manager, over a real socket."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.frontend.supervisor.service_manager import ServiceManager
from tests.frontend.conftest import DEADLINE


class Listener:
    """Socket of a service manager."""

    def __init__(self, address: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(address)
        self._sock.settimeout(DEADLINE)

    def next(self) -> list[str]:
        """Wait for the lines of the next datagram."""
        return self._sock.recv(4096).decode().split("\n")

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def listener(ipc_dir: Path) -> Iterator[Listener]:
    found = Listener(f"{ipc_dir}/notify")
    yield found
    found.close()


def manager(ipc_dir: Path, **more: str) -> ServiceManager:
    return ServiceManager({"NOTIFY_SOCKET": f"{ipc_dir}/notify", **more})


def test_readiness_is_told_once_and_status_when_it_changes(listener: Listener, ipc_dir: Path) -> None:
    states = iter(
        [(False, "loading: 10\n%"), (False, "loading: 10\n%"), (True, "ready"), (False, "lost"), (True, "ready")]
    )

    def status() -> tuple[bool, str]:
        try:
            return next(states)
        except StopIteration:
            raise asyncio.CancelledError from None

    async def follow() -> None:
        found = manager(ipc_dir, WATCHDOG_USEC="20000", WATCHDOG_PID=str(os.getpid()))
        assert found.watchdog_seconds == 0.02
        found.reloading()  # systemd would refuse it of a service that is starting
        with pytest.raises(asyncio.CancelledError):
            await found.follow(status)
        found.reloading()
        found.reloaded()
        found.stopping()

    asyncio.run(follow())
    assert listener.next() == ["WATCHDOG=1", "STATUS=loading: 10 %"]
    assert listener.next() == ["WATCHDOG=1"]
    assert listener.next() == ["READY=1", "WATCHDOG=1", "STATUS=ready"]
    assert listener.next() == ["WATCHDOG=1", "STATUS=lost"]
    assert listener.next() == ["WATCHDOG=1", "STATUS=ready"]
    reloading, monotonic = listener.next()
    assert reloading == "RELOADING=1" and int(monotonic.removeprefix("MONOTONIC_USEC=")) > 0
    assert listener.next() == ["READY=1"]
    assert listener.next() == ["STOPPING=1", "STATUS=stopping"]


def test_socket_of_the_abstract_namespace_is_reached() -> None:
    name = f"tandem-test-{os.getpid()}"
    found = Listener(f"\0{name}")
    ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).notify("READY=1")
    assert found.next() == ["READY=1"]
    found.close()


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [
        ("2000000", "", 2.0),
        ("2000000", "own", 2.0),
        ("2000000", "1", None),
        ("", "", None),
        ("0", "", None),
        ("x", "", None),
    ],
)
def test_watchdog_is_fed_if_the_manager_wants_it_of_this_process(
    usec: str, pid: str, seconds: float | None, ipc_dir: Path
) -> None:
    pid = str(os.getpid()) if pid == "own" else pid
    assert manager(ipc_dir, WATCHDOG_USEC=usec, WATCHDOG_PID=pid).watchdog_seconds == seconds


def test_without_a_manager_and_with_one_that_is_gone_nothing_happens(ipc_dir: Path) -> None:
    assert ServiceManager({"WATCHDOG_USEC": "1000"}).watchdog_seconds is None
    asyncio.run(ServiceManager({}).follow(lambda: pytest.fail("nobody asks")))
    manager(ipc_dir).notify("READY=1")
