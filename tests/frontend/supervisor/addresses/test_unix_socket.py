"""The file of a listening Unix socket: permissions, leftovers, other servers."""

import os
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tandem.frontend.supervisor.addresses.unix_socket import MAX_PATH_BYTES, listening_unix_socket
from tandem.frontend.supervisor.model import AddressInUseError, LaunchError


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def leave_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_file_has_its_permissions_while_the_socket_listens_and_is_removed_at_the_end(ipc_dir: Path, mode: int) -> None:
    path = ipc_dir / "api"
    with listening_unix_socket(path, mode):
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert connects(path)
    assert not path.exists()


def test_file_that_a_killed_process_left_is_replaced(ipc_dir: Path) -> None:
    path = ipc_dir / "api"
    leave_stale(path)
    with listening_unix_socket(path, 0o600):
        assert connects(path)


def test_path_of_a_running_server_is_refused_and_its_file_stays(ipc_dir: Path) -> None:
    path = ipc_dir / "api"
    with listening_unix_socket(path, 0o600):
        with pytest.raises(AddressInUseError, match=rf"{path}\b.*--uds\b"):
            ExitStack().enter_context(listening_unix_socket(path, 0o600))
        assert connects(path)


def test_file_that_is_not_a_socket_is_refused_and_stays(ipc_dir: Path) -> None:
    path = ipc_dir / "api"
    path.write_text("notes")
    with pytest.raises(LaunchError, match=rf"{path}\b.*--uds\b"):
        ExitStack().enter_context(listening_unix_socket(path, 0o600))
    assert path.read_text() == "notes"


def test_missing_folder_and_long_path_are_refused_by_name(ipc_dir: Path) -> None:
    with pytest.raises(LaunchError, match=rf"{ipc_dir}/none\b.*--uds\b"):
        ExitStack().enter_context(listening_unix_socket(ipc_dir / "none" / "api", 0o600))
    path = ipc_dir / ("a" * MAX_PATH_BYTES)
    with pytest.raises(LaunchError, match=rf"\b{len(os.fsencode(path))}\b.*\b{MAX_PATH_BYTES}\b"):
        ExitStack().enter_context(listening_unix_socket(path, 0o600))


def test_socket_of_a_successor_is_not_removed(ipc_dir: Path) -> None:
    path = ipc_dir / "api"
    with listening_unix_socket(path, 0o600):
        path.unlink()
        leave_stale(path)
    assert path.exists()


def test_of_many_servers_that_start_at_once_on_a_stale_path_one_is_let_in(ipc_dir: Path) -> None:
    path = ipc_dir / "api"
    barrier = threading.Barrier(8)

    def start() -> ExitStack | None:
        barrier.wait(30)
        stack = ExitStack()
        try:
            stack.enter_context(listening_unix_socket(path, 0o600))
        except AddressInUseError:
            return None
        return stack

    for _ in range(20):
        leave_stale(path)
        with ThreadPoolExecutor(8) as pool:
            started = [future.result() for future in [pool.submit(start) for _ in range(8)]]
        (winner,) = [stack for stack in started if stack is not None]
        assert connects(path)
        winner.close()
        assert not path.exists()
