"""What is checked before any process starts: ports and endpoints."""

import errno
import os
import re
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tandem.frontend.cli.main import build_parser, main
from tandem.frontend.supervisor import launch, model
from tandem.frontend.supervisor.launch import (
    check_endpoint_path,
    check_length,
    check_unused,
    default_frontends,
    listen_ops,
)
from tandem.frontend.supervisor.model import LaunchError
from tests.support.refusals import numbers_in
from tests.support.serving import free_port
from tests.support.tcp_proxy import free_ports


def test_default_ops_port_gives_way_to_the_next_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(launch, "DEFAULT_OPS_PORT", port)
        with listen_ops("127.0.0.1", None) as found:
            assert found.getsockname()[1] > port
        with pytest.raises(LaunchError, match=rf"127\.0\.0\.1:{port}\b.*\bprocess \d+\b.*--ops"):
            listen_ops("127.0.0.1", port)


@pytest.mark.parametrize("command", [["serve"], ["frontend", "--endpoint", "ipc:///nowhere/engine"]])
def test_equal_port_and_ops_port_are_refused_by_name(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main([*command, "--model", str(tmp_path), "--port", "9000", "--ops-port", "9000"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--port" in line and "--ops-port" in line and "9000" in line


def test_default_ops_port_gives_way_to_the_port_of_the_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    port = free_port()
    opened: list[int] = []

    class Recorder:
        """Supervisor that notes the ports it got instead of running."""

        def __init__(self, *parts: Any) -> None:
            opened.extend(sock.getsockname()[1] for sock in (*parts[2], parts[6]))

        async def run(self) -> int:
            return 0

    monkeypatch.setattr(launch, "DEFAULT_OPS_PORT", port)
    monkeypatch.setattr(launch, "Supervisor", Recorder)
    assert main(["serve", "--model", str(tmp_path), "--port", str(port), "--frontends", "1"]) == 0
    assert opened[0] == port < opened[1]


def test_address_of_another_machine_asks_for_another_host(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", "--model", str(tmp_path), "--ops-port", "0", "--host", "192.0.2.1", "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "192.0.2.1:0" in line and "--host" in line


def test_ipc_endpoint_of_a_running_engine_is_refused(ipc_dir: Path) -> None:
    endpoint = f"ipc://{ipc_dir}/engine"
    check_unused(endpoint)
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(f"{ipc_dir}/engine")
        engine.listen()
        with pytest.raises(LaunchError, match=re.escape(endpoint)):
            check_unused(endpoint)
    check_unused(endpoint)  # the file of an engine that was killed is no obstacle


@pytest.mark.parametrize("host", ["127.0.0.1", "*"])
def test_tcp_endpoint_needs_its_port_and_the_next(host: str) -> None:
    first = free_ports(2)
    with socket.create_server(("0.0.0.0", first + 1)):
        for port in (first, first + 1):
            with pytest.raises(LaunchError, match=rf"\b{first + 1}\b"):
                check_unused(f"tcp://{host}:{port}")


@pytest.mark.parametrize("command", [["serve"], ["frontend", "--endpoint", "ipc:///nowhere/engine"]])
def test_unreadable_chat_template_is_refused_before_a_model_is_sought(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "find_model", lambda *_, **__: pytest.fail("no model is sought"))
    missing = tmp_path / "none.jinja"
    assert main([*command, "--model", "a/model-of-the-hub", "--chat-template", str(missing)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(missing) in line and "--chat-template" in line


@pytest.mark.parametrize("command", [["serve"], ["engine", "--endpoint", "ipc:///nowhere/engine"]])
def test_length_beyond_the_models_positions_is_refused_before_anything_starts(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    monkeypatch.setattr(launch, "run_directory", lambda: pytest.fail("nothing is prepared"))
    assert main([*command, "--model", str(tmp_path), "--max-len", "2049"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--max-len 2049 " in line and str(tmp_path) in line and 2048 in numbers_in(line)


def test_length_within_the_models_positions_and_of_an_unknown_model_is_left_to_the_engine(tmp_path: Path) -> None:
    check_length(4096, tmp_path)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    check_length(2048, tmp_path)
    check_length(None, tmp_path)


@pytest.mark.parametrize(
    ("hosts", "flags", "allowed", "warns"),
    [
        (["127.0.0.1"], [], ["loopback"], False),
        (["127.0.0.1", "::1"], [], ["loopback"], False),
        (["0.0.0.0"], [], ["*"], True),
        (["0.0.0.0"], ["--api-key", "secret"], ["*"], False),
        (["0.0.0.0"], ["--allowed-hosts", "a.example"], ["a.example"], True),
        ([], ["--uds"], ["loopback"], False),
    ],
)
def test_open_address_without_keys_is_warned_of_and_serves_any_host(
    hosts: list[str], flags: list[str], allowed: list[str], warns: bool, ipc_dir: Path,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    given = [word for host in hosts for word in ("--host", host)] + ["--port", "0"] * bool(hosts)
    flags = [*flags, f"{ipc_dir}/api"] if flags == ["--uds"] else flags
    arguments = build_parser().parse_args(["serve", "--frontends", "1", *given, *flags])
    with ExitStack() as stack:
        launch._open_listeners(arguments, stack)
    assert arguments.allowed_hosts == allowed
    assert ("--api-keys" in caplog.text) is warns


@pytest.mark.parametrize(
    ("cores", "frontends"), [(1, 1), (2, 1), (3, 1), (4, 2), (9, 7), (10, 8), (16, 8), (192, 8)], ids=str
)
def test_default_leaves_two_cores_and_stays_between_one_and_eight(cores: int, frontends: int) -> None:
    assert default_frontends(cores) == frontends


def test_an_endpoint_that_others_could_reach_is_refused_before_anything_starts(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(LaunchError, match=f"ipc://{tmp_path}/e"):
        check_endpoint_path(f"ipc://{tmp_path}/e")
    (tmp_path / "own").mkdir(mode=0o700)
    check_endpoint_path(f"ipc://{tmp_path}/own/e")
    check_endpoint_path(f"ipc://{tmp_path}/missing/e")
    with pytest.raises(LaunchError, match=os.strerror(errno.ENAMETOOLONG)):
        check_endpoint_path(f"ipc://{tmp_path}/{'e' * 300}/e")


def test_a_start_checks_the_place_of_its_endpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert main(["engine", "--endpoint", f"ipc://{tmp_path}/e", "--ops-port", "0"]) == 2
    assert f"ipc://{tmp_path}/e" in (error := capsys.readouterr().err) and "0700" in error
