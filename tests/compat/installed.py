"""Clients in throw-away directories, each with an environment that has no account, telemetry or updates."""

import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from tests.compat.pins import Client

HERE = Path(__file__).parent
QUIET = {
    # Telemetry, tracing, error reports, updates.
    "DO_NOT_TRACK": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CONTINUE_CLI_ENABLE_TELEMETRY": "0",
    "CONTINUE_CLI_AUTO_UPDATED": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "NO_UPDATE_NOTIFIER": "1",
    "NODE_NO_WARNINGS": "1",
    "TERM": "dumb",
    "LANG": "C.UTF-8",
}


@dataclass(frozen=True)
class Installed:
    """A client and the folder that holds it."""

    client: Client
    folder: Path

    @property
    def home(self) -> Path:
        """The home directory of its processes, where they find no settings of the user's."""
        return self.folder / "home"

    @property
    def environ(self) -> dict[str, str]:
        """The environment of its processes: none of the caller's keys."""
        path = f"{self.folder / 'node_modules' / '.bin'}:{os.environ['PATH']}"
        return {**QUIET, "PATH": path, "HOME": str(self.home), "PYTHONPATH": str(HERE)}

    def command(self, url: str) -> list[str]:
        """Return the command that runs its checks against a server."""
        script = str(HERE / self.client.script)
        if not self.client.from_npm:
            return [str(self.folder / "bin" / "python"), script, url]
        if script.endswith(".py"):
            return [sys.executable, script, url, str(self.folder)]
        # A module of Node's finds packages from where it lies.
        copy = self.folder / self.client.script
        copy.write_text(Path(script).read_text())
        return [str(self.folder / "node_modules" / ".bin" / "node"), str(copy), url]


def install(client: Client, environments: Path) -> Installed:
    """Install a client at its pins unless its folder holds just these."""
    folder = environments / re.sub(r"\W+", "-", client.name.lower())
    marker = folder / "pins.txt"
    pins = "\n".join(client.packages)
    if not marker.exists() or marker.read_text() != pins:
        if client.from_npm:
            install_from_npm(client, folder)
        else:
            venv.create(folder, with_pip=True, clear=True)
            subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *client.packages], check=True)
        marker.write_text(pins)
    installed = Installed(client, folder)
    shutil.rmtree(installed.home, ignore_errors=True)
    installed.home.mkdir()
    return installed


def install_from_npm(client: Client, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text("{}")
    flags = ("--no-fund", "--no-audit", "--no-update-notifier", "--save-exact", "--loglevel=error")
    subprocess.run(["npm", "install", "--prefix", folder, *flags, *client.packages], check=True, cwd=folder)
