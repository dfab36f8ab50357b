"""The systemd units: accepted by systemd, and in agreement with the flags."""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.frontend.cli.main import build_parser
from tests.support.serving import GUARD_SECONDS

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
TANDEM = "/opt/tandem/bin/tandem"
FILES = {"tandem.service": "serve", "tandem-engine.service": "engine", "tandem-frontend@.service": "frontend"}

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


def settings(name: str) -> dict[str, str]:
    """Return the settings of a unit whose names occur once."""
    text = (UNITS / name).read_text().replace("\\\n", " ").replace("%i", "8001")
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


@needs_systemd
def test_systemd_has_nothing_to_say_about_the_units(tmp_path: Path) -> None:
    installed = str(Path(sys.executable).with_name("tandem"))
    written = []
    for name in FILES:
        unit = tmp_path / name.replace("@", "@8001")
        text = (UNITS / name).read_text()
        assert TANDEM in text
        unit.write_text(text.replace(TANDEM, installed))
        (tmp_path / f"{unit.name}.d").mkdir()
        shutil.copy(UNITS / "hub-token.conf", tmp_path / f"{unit.name}.d")
        shutil.copy(UNITS / "cpu.conf", tmp_path / f"{unit.name}.d")
        written.append(str(unit))
    command = ["systemd-analyze", "verify", "--man=no", *written]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_SECONDS, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd is not installed")
def test_the_user_of_the_units_is_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    command = ["systemd-sysusers", f"--root={tmp_path}", str(UNITS / "tandem.sysusers.conf")]
    subprocess.run(command, check=True, capture_output=True, timeout=GUARD_SECONDS)
    (user,) = [line for line in (tmp_path / "etc" / "passwd").read_text().splitlines() if line.startswith("tandem:")]
    assert user.split(":")[5] == "/var/lib/tandem"
    for name in FILES:
        unit = settings(name)
        assert (unit["User"], unit["Group"], unit["WorkingDirectory"]) == ("tandem", "tandem", "/var/lib/tandem")


def parsed(name: str, flags: str = "") -> tuple[list[str], argparse.Namespace]:
    """Return the words of a unit's command, and what they mean with its file of flags, or the file `flags`."""
    program, *argv = shlex.split(settings(name)["ExecStart"])
    assert program == TANDEM
    words = [re.sub(r"^/etc/tandem/(.*)", lambda found: str(UNITS / (flags or found[1])), word) for word in argv]
    return argv, build_parser().parse_args(words)


@pytest.mark.parametrize(("name", "command"), FILES.items())
def test_tandem_accepts_the_command_and_has_time_to_drain(name: str, command: str) -> None:
    argv, arguments = parsed(name)
    assert (arguments.command, "--ops-port" in argv) == (command, True)
    assert settings(name)["TimeoutStopSec"] == "45"
    if command != "engine":
        assert (arguments.shutdown_delay, arguments.drain_timeout) == (5, 25)


def test_flags_of_a_cpu_host_differ_in_model_and_device() -> None:
    _, usual = parsed("tandem.service")
    _, cpu = parsed("tandem.service", "tandem-cpu.toml")
    assert {name for name in vars(usual) if vars(usual)[name] != vars(cpu)[name]} == {"config", "model", "device"}
    assert cpu.device == "cpu"


@pytest.mark.parametrize("name", FILES)
def test_a_unit_follows_the_supervisor(name: str) -> None:
    unit = settings(name)
    assert (unit["Type"], unit["NotifyAccess"], unit["KillMode"]) == ("notify", "main", "mixed")
    assert unit["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert int(unit["WatchdogSec"]) >= 10
    assert int(unit["LimitNOFILE"]) == 65536


def test_ports_of_instances_do_not_meet_those_of_the_engine() -> None:
    _, arguments = parsed("tandem-frontend@.service")
    assert (arguments.port, arguments.ops_port) == (8001, 18001)
    _, engine = parsed("tandem-engine.service")
    assert engine.endpoint == arguments.endpoint
    assert str(engine.model) == str(arguments.model_dir)
    folders = {settings(name).get("RuntimeDirectory") for name in FILES} - {None}
    assert engine.endpoint == f"ipc:///run/{folders.pop()}/engine"
