"""Run an agent's command line as a user does, in a project folder of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 240
SAID = "hello-from-the-tool"
SHELL_COMMAND = f"echo {SAID} > said.txt && cat said.txt"


def folder() -> Path:
    """Return the directory that the client is installed in."""
    return Path(sys.argv[2])


def program(name: str) -> str:
    return str(folder() / "node_modules" / ".bin" / name)


def project() -> Path:
    """Return a new directory under the client's home to work in."""
    path = Path(os.environ["HOME"]) / "project"
    path.mkdir()
    return path


def ran(command: list[str], cwd: Path, **environ: str) -> str:
    """Return the standard output of a command, which has to succeed."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environ}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr, file=sys.stderr)
    if done.returncode != 0:
        raise RuntimeError(f"exit {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
    return done.stdout


def events(output: str) -> list[dict[str, Any]]:
    """Return the JSON objects of an output that has one a line."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def play(name: str, **arguments: str) -> str:
    """Return the line of a prompt that makes the scripted engine call a tool."""
    return f"PLAY {json.dumps({'name': name, 'arguments': arguments})}"
