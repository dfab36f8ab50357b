"""Command-line flags, and the settings that are rejected before anything starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from tandem.frontend.cli.main import build_parser, main
from tandem.frontend.config import ChatOptions
from tandem.frontend.flags.arguments import child_argv, frontend_config
from tandem.frontend.listening import listen
from tandem.frontend.request.limits import RequestLimits
from tandem.frontend.run_directory import run_directory
from tandem.frontend.store.store import StoreLimits
from tandem.frontend.supervisor import launch, model
from tandem.frontend.supervisor.addresses import service_sockets
from tandem.protocol.engine_options import engine_options
from tandem.protocol.installing import install_extra
from tandem.protocol.transport_options import transport_argv
from tandem.protocol.version import distribution_version
from tests.fakes.tokenizer import write_tokenizer
from tests.support.refusals import numbers_in

CHILD = child_argv(1, [(5, 7), (6, 7)], 9)
"""Flags that a supervisor gives to a frontend process."""


def test_version_flag_prints_the_distribution_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"tandem {distribution_version()}\n"


def test_serve_without_torch_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda _: None)
    assert main(["serve"]) == 2
    assert install_extra("engine") in capsys.readouterr().err


def test_start_failure_prints_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_sockets, "HANDOVER_SECONDS", 0.1)
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        long = "ipc://" + "x" * 120
        folder = ["--model", str(tmp_path)]
        (tmp_path / "config.json").write_text("{}")
        for argv, reason in (
            (["serve", "--model", "/nowhere"], "the model /nowhere is not a directory"),
            (["serve", *folder, "--port", "0", "--ops-port", port], f"cannot listen on 127.0.0.1:{port}"),
            (["serve", *folder, "--ops-port", "0", "--port", port], "choose another --port"),
            (["engine", *folder, "--endpoint", long], "choose a shorter one"),
            (["engine", *folder, "--endpoint", "tcp://127.0.0.1:1"], "--curve-keys"),
            (
                ["frontend", "--model-dir", str(tmp_path), "--endpoint", "ipc:///x", "--port", "0"],
                "has no tokenizer.json",
            ),
            *(
                ([*command, "--insecure-tcp", "--endpoint", f"tcp://127.0.0.1{port}"], "has no port from 1 to 65534")
                for command in (["engine", *folder], ["frontend", "--model-dir", str(tmp_path)])
                for port in ("", ":", ":abc", ":0", ":65535", ":70000", ":*", ":-1")
            ),
            (["frontend", "--model-dir", str(tmp_path), "--endpoint", "http://x"], "neither ipc:// nor tcp://"),
            (["frontend", "--model-dir", ".", "--endpoint", "ipc:///x", "--max-concurrent", "0"], "must be between 1"),
            # One of two places is kept from requests, so that one place would serve none.
            (
                ["frontend", "--model-dir", ".", "--endpoint", "ipc:///x", "--limit-concurrency", "1"],
                "--limit-concurrency must be between 2 and",
            ),
            (
                ["frontend", "--model-dir", ".", "--endpoint", "ipc:///x", "--default-max-tokens", "0"],
                "must be between 1",
            ),
        ):
            assert main(argv) == 2, argv
            error = capfd.readouterr().err
            assert reason in error
            assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "65536"), ("--port", "-1"), ("--ops-port", "70000"), ("--drain-timeout", "-1"),
        ("--drain-timeout", "nan"), ("--drain-timeout", "inf"), ("--beat-timeout", "nan"), ("--beat-timeout", "inf"),
        ("--beat-timeout", "0"), ("--step-timeout", "nan"), ("--step-timeout", "inf"), ("--step-timeout", "-1"),
    ],
)  # fmt: skip
def test_number_out_of_range_is_rejected_by_flag_name(
    flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", str(tmp_path), f"{flag}={value}"]) == 2
    error = capsys.readouterr().err
    assert flag in error and len(numbers_in(error)) >= 2
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", [["serve"], ["engine", "--endpoint", "ipc:///x"]])
def test_numbers_of_all_flags_are_told_together(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--max-concurrent=0", "--max-len=1", "--ops-port=-1"]) == 2
    told = sorted(capsys.readouterr().err.splitlines())
    assert [line.split()[1] for line in told] == ["--max-concurrent", "--max-len", "--ops-port"]
    assert [numbers_in(line.replace(":", "")) for line in told] == [[1, 2_147_483_647, 0], [1, 2], [0, 65535, -1]]


def test_keys_writes_a_private_secret_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert main(["keys", str(folder)]) == 0
    assert "engine.key" in capsys.readouterr().out
    assert (folder / "engine.key_secret").stat().st_mode & 0o077 == 0


def test_keys_of_a_client_are_made_beside_the_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert main(["keys", str(folder), "--client", "web1"]) == 2
    assert "engine.key" in capsys.readouterr().err
    assert main(["keys", str(folder)]) == 0
    assert main(["keys", str(folder), "--client", "web1"]) == 0
    output = capsys.readouterr().out
    assert f"move {folder}/frontends/web1 " in output
    assert f"delete {folder}/clients/web1.key" in output
    assert main(["keys", str(folder), "--client", "web1"]) == 2
    assert "web1" in capsys.readouterr().err


def test_supervisor_forwards_its_flags(tmp_path: Path) -> None:
    argv = ["--max-concurrent", "7", "--drain-timeout", "3.5", "--step-timeout", "9", "--log-level", "warning"]
    arguments = build_parser().parse_args(["serve", *argv, "--model", "/m", "--max-len", "512", "--device", "cpu"])
    command = launch.engine_command("ipc:///e", engine_options(arguments), transport_argv(arguments))
    assert command[:6] == [sys.executable, "-P", "-m", "tandem.engine_core", "--endpoint", "ipc:///e"]
    engine = build_parser().parse_args(["engine", *command[4:]])
    assert engine_options(engine) == engine_options(arguments)
    assert engine_options(engine).max_concurrent == 7, "one flag feeds the engine and its frontends"
    command = launch.frontend_command(arguments, "ipc:///e", tmp_path, tmp_path / "state", CHILD)
    config = frontend_config(build_parser().parse_args(["frontend", *command[4:]]))
    assert (config.endpoint, config.model_dir) == ("ipc:///e", tmp_path)
    assert (config.listener_fds, config.slot, config.supervisor_fd) == (((5, 7), (6, 7)), 1, 9)
    assert (config.max_concurrent, config.drain_timeout, config.step_timeout) == (7, 3.5, 9.0)


@pytest.mark.parametrize(
    ("given", "engine_name"),
    [([], None), (["a"], "a"), (["a", "b c"], "a"), (["*", "-x"], "-x"), (["*"], None)],
)
def test_supervisor_gives_the_engine_one_name_and_the_frontend_all(
    tmp_path: Path, given: list[str], engine_name: str | None
) -> None:
    arguments = build_parser().parse_args(["serve", *(f"--served-model-name={name}" for name in given)])
    command = launch.engine_command("ipc:///e", engine_options(arguments))
    engine = build_parser().parse_args(["engine", *command[4:]])
    assert engine_options(engine).served_model_name == engine_name
    command = launch.frontend_command(arguments, "ipc:///e", tmp_path, tmp_path / "state", CHILD)
    assert frontend_config(build_parser().parse_args(["frontend", *command[4:]])).served_names == tuple(given)


def test_names_of_a_model_may_follow_one_flag_and_are_not_blank(capsys: pytest.CaptureFixture[str]) -> None:
    assert build_parser().parse_args(["serve", "--served-model-name", "a", "*"]).served_model_name == ["a", "*"]
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--served-model-name", " "])
    assert "--served-model-name" in capsys.readouterr().err


def test_supervisor_forwards_limits_and_access_flags(tmp_path: Path) -> None:
    argv = ["--max-body", "2", "--max-n", "3", "--max-top-logprobs", "0", "--max-stop-strings", "1"]
    argv += ["--max-queued-tokens", "9", "--max-prompt-tokens", "8", "--cors-origin", "*"]
    argv += ["--cors-origin", "https://a.example", "--api-key", "secret"]
    argv += ["--store", "off", "--store-size", "7", "--store-size-per-key", "3", "--store-ttl", "60"]
    arguments = build_parser().parse_args(["serve", *argv])
    command = launch.frontend_command(arguments, "ipc:///e", tmp_path, tmp_path / "state", CHILD)
    assert "secret" not in " ".join(command)
    config = frontend_config(build_parser().parse_args(["frontend", *command[4:]]))
    assert config.limits == RequestLimits(3, 0, 1, 8)
    assert (config.max_body, config.load_limits) == (2 * 2**20, (1024, 9))
    assert config.cors_origins == ("*", "https://a.example")
    assert config.api_keys == ()
    assert (config.store, config.state_dir) == (False, tmp_path / "state")
    assert config.store_limits == StoreLimits(7 * 2**20, 60.0, 3 * 2**20)


def test_access_flags_are_checked_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cert = tmp_path / "cert.pem"
    cert.write_text("no certificate")
    for flags, reason in (
        (["--cors-origin", "a.example"], "--cors-origin a.example is not an origin"),
        (["--cors-origin", "https://a.example/path"], "is not an origin"),
        (["--tls-cert", str(cert)], "--tls-cert and --tls-key belong together"),
        (["--tls-cert", str(cert), "--tls-key", str(cert)], "cannot be used: both must be in PEM format\n"),
        (["--tls-cert", "/none", "--tls-key", "/none"], "--tls-cert /none cannot be read: No such file or"),
        (["--tls-cert", str(cert), "--tls-key", "/none"], "--tls-key /none cannot be read: No such file or directory"),
        (["--api-key", "two words"], "printable ASCII"),
        (["--api-key-file", "/none"], "cannot be read: No such file or directory\n"),
        (["--max-n", "129"], "--max-n must be between 1 and 128"),
        (["--max-body", "0"], "--max-body must be between 1 and 1024"),
        (["--max-top-logprobs", "21"], "--max-top-logprobs must be between 0 and 20"),
    ):
        serve = ["serve", "--model", str(tmp_path), "--port", "0", "--ops-port", "0"]
        for command in (serve, ["frontend", "--model-dir", str(tmp_path), "--endpoint", "ipc:///x"]):
            assert main([*command, *flags]) == 2, flags
            error = capsys.readouterr().err
            assert reason in error, flags
            assert error.count("\n") == 1, error


def test_access_flags_are_checked_before_a_model_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model, "find_model", lambda *_: pytest.fail("the model was looked for"))
    (tmp_path / "cert.pem").write_text("not a certificate")
    flags = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "cert.pem"))
    assert main(["serve", "organization/name", *flags]) == 2
    assert "--tls-cert" in (error := capsys.readouterr().err) and "PEM" in error


def test_supervisor_forwards_chat_flags(tmp_path: Path) -> None:
    argv = ["--chat-template", "t.jinja", "--default-max-tokens", "9", "--tool-parser", "mistral"]
    for given, expected in (
        ([], ChatOptions()),
        ([*argv, "--reasoning-parser", "none"], ChatOptions(9, Path("t.jinja"), "mistral", "none")),
    ):
        arguments = build_parser().parse_args(["serve", *given])
        command = launch.frontend_command(arguments, "ipc:///e", tmp_path, tmp_path / "state", CHILD)
        assert frontend_config(build_parser().parse_args(["frontend", *command[4:]])).chat == expected


def test_invalid_chat_template_prints_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "broken.jinja").write_text("{% if %}")
    argv = ["frontend", "--model-dir", str(tmp_path), "--endpoint", "ipc:///x", "--port", "0", "--chat-template"]
    for name, reason in (("broken.jinja", "line 1"), ("missing.jinja", "cannot be read: No such file or directory; ")):
        assert main([*argv, str(tmp_path / name)]) == 2
        error = capfd.readouterr().err
        assert reason in error
        assert error.count("\n") == 1


def test_unusable_store_prints_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_tokenizer(tmp_path)
    argv = ["frontend", "--model-dir", str(tmp_path), "--endpoint", "ipc:///x", "--port", "0"]
    argv += ["--log-level", "warning", "--state-dir"]
    (tmp_path / "file").touch()
    (tmp_path / "store.sqlite3").write_text("no database " * 100)
    for directory, reason in ((tmp_path / "file", "cannot be opened"), (tmp_path, "move it away")):
        assert main([*argv, str(directory)]) == 2
        error = capfd.readouterr().err
        assert reason in error
        assert error.count("\n") == 1


def test_private_endpoint_is_removed_on_exit() -> None:
    with run_directory() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(launch.private_endpoint(folder)) < 100
    assert not folder.exists()


def test_parsing_flags_loads_no_http_client_server_or_hub() -> None:
    program = (
        "import sys, tandem.frontend.cli.main\n"
        "tandem.frontend.cli.main.build_parser().parse_args(['chat', '--insecure'])\n"
        "print([m for m in ('httpx', 'httpx2', 'huggingface_hub', 'fastapi', 'uvicorn') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
