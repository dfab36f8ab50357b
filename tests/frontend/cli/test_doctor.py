"""A report on the machine, its ports, the model and the choices of a server."""

import errno
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tandem.frontend.cli import doctor
from tandem.frontend.cli.doctor import run_doctor
from tandem.frontend.cli.main import build_parser, main
from tandem.frontend.listening import listen
from tandem.frontend.supervisor.addresses.tcp_address import port_owner
from tandem.frontend.supervisor.preflight import run_preflight
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.preflight import PreflightReport
from tests.support.serving import free_port

CHOICES = PreflightReport(
    ["NVIDIA L4, compute capability 8.9"], {"supported": "yes"}, {"rows": "256 (default on cuda)"}
)
PORTS = ["--port", "0", "--ops-port", "0"]


def report(*argv: str, found: PreflightReport = CHOICES) -> int:
    return run_doctor(build_parser().parse_args(["doctor", *argv]), lambda *_: found)


def test_report_states_versions_machine_ports_model_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(*PORTS) == 0
    text = capsys.readouterr().out
    for line in ("tandem-llm", "torch", "CPU cores", "open files", "/dev/shm", "GPU 0             NVIDIA L4, compute",
                 "rows              256 (", "NVIDIA driver", "supported         yes"):  # fmt: skip
        assert f"\n  {line}" in text
    assert "\nproblems\n" not in text


def test_json_report_has_the_same_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert report("--json", *PORTS) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["sections"]) == ["versions", "machine", "ports", "model", "choices"]
    assert found["sections"]["choices"] == CHOICES.choices
    assert found["problems"] == []


def test_ports_in_use_name_their_process_and_only_given_ones_are_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert port_owner(port).endswith(f"(process {os.getpid()})")
        assert report("--port", str(port), "--ops-port", "0") == 1
        reason = f"cannot listen on 127.0.0.1:{port} (Address already in use, used by {port_owner(port)}); "
        assert reason in (text := capsys.readouterr().out) and "--port" in text
        assert report("--port", "0", "--ops-port", str(port)) == 1
        assert "--ops-port" in capsys.readouterr().out
        monkeypatch.setattr(doctor, "DEFAULT_OPS_PORT", port)
        assert report("--port", "0") == 0
        assert "next free one" in capsys.readouterr().out


def test_address_that_this_machine_does_not_have_is_used_by_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    assert report("--port", "0", "--ops-host", "192.0.2.1", "--ops-port", "8100") == 1
    text = capsys.readouterr().out
    assert re.search(rf"192\.0\.2\.1:8100 \({os.strerror(errno.EADDRNOTAVAIL)}\);.* --ops-port\b", text)
    assert "\n  ops port          192.0.2.1:8100 " in text


def test_one_port_asked_for_twice_is_a_problem_unless_it_is_the_default_ops_port(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    assert report("--port", str(port), "--ops-port", str(port)) == 1
    text = capsys.readouterr().out
    assert re.search(rf"--port and --ops-port .*\b{port} on 127\.0\.0\.1", text)
    assert re.search(rf"\n  ops port          127\.0\.0\.1:{port} .*\btwice\n", text)
    monkeypatch.setattr(doctor, "DEFAULT_OPS_PORT", port)
    assert report("--port", str(port)) == 0
    assert "twice; " in capsys.readouterr().out
    assert report("--host", "nowhere.invalid", "--port", str(port), "--ops-port", str(port)) == 1
    assert f"ops port          127.0.0.1:{port} is free" in capsys.readouterr().out


def test_unknown_owner_of_a_port_is_another_process(tmp_path: Path) -> None:
    assert port_owner(1, tmp_path) == "another process"


def test_the_name_of_a_process_may_be_cut_or_hold_what_a_terminal_obeys(tmp_path: Path) -> None:
    listening = "0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 77 1"
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(f"header\n{listening}\n")
    (tmp_path / "12" / "fd").mkdir(parents=True)
    (tmp_path / "12" / "fd" / "3").symlink_to("socket:[77]")
    for name, shown in (("ä" * 8).encode()[:15], "ä" * 7 + "\ufffd"), (b"a\x1b[2J\nb", "a?[2J?b"):
        (tmp_path / "12" / "comm").write_bytes(name + b"\n")
        assert port_owner(8080, tmp_path) == f"{shown} (process 12)"


@pytest.mark.parametrize(
    ("argv", "found", "problem"),
    [
        (["--model", "/nowhere"], CHOICES, "the model /nowhere is not a directory"),
        (["--page-size", "15"], CHOICES, "--page-size 15 is not a power of two"),
        ([], PreflightReport(problems=["--device cuda, but torch sees none"]), "--device cuda, but torch sees none"),
    ],
)
def test_what_prevents_a_start_is_a_problem(
    argv: list[str], found: PreflightReport, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(*argv, *PORTS, found=found) == 1
    text = capsys.readouterr().out
    assert problem in text.partition("\nproblems\n")[2]


@pytest.mark.parametrize(("content", "problem"), [(None, "has no tokenizer.json"), (b"{}", "cannot be read")])
def test_unusable_tokenizer_is_a_problem_beside_the_choices(
    content: bytes | None, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    assert report("--model", str(tmp_path), *PORTS) == 1
    text = capsys.readouterr().out
    assert problem in text.partition("\nproblems\n")[2]
    assert "\n  rows              256 (" in text


def test_name_that_the_hub_cannot_give_is_not_called_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert report("--model", "org/never", "--download-dir", str(tmp_path), *PORTS) == 1
    assert "\n  name              org/never\n" in capsys.readouterr().out


def test_report_has_no_keys_and_no_values_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "sk-very-private")
    monkeypatch.setenv("HF_TOKEN", "hf-very-private")
    report(*PORTS)
    report("--json", *PORTS)
    assert "very-private" not in capsys.readouterr().out


def test_engine_that_cannot_be_loaded_is_reported_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf-very-private")

    def run(command: list[str], env: dict[str, str], **_: Any) -> "subprocess.CompletedProcess[str]":
        assert "HF_TOKEN" not in env
        assert env["PATH"]
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nImportError: libcudart.so.13 is missing\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ValueError, match=r"\b1\b.*libcudart\.so\.13"):
        run_preflight(EngineOptions(), None)


def test_command_asks_the_engine_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", *PORTS, "--device", "cpu", "--max-rows", "3"]) == 0
    choices = json.loads(capsys.readouterr().out)["sections"]["choices"]
    assert re.fullmatch(r"cpu \(.*--device\)", choices["device"])
    assert re.fullmatch(r"3 \(.*--max-rows\)", choices["rows"])
