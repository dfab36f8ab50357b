"""Frontends of a checkout with a scripted engine of this one."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.measuring.processes import cpu_seconds, family, stop_process
from tests.fakes.scripted_engine import Journal, Script
from tests.support.serving import free_port
from tests.support.stream_client import answer

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "engine_core" / "default_model"
SERVED_NAME = "tandem-default"
"""Model name in the clients' requests."""
READY_SECONDS, STOP_SECONDS = 120.0, 30.0
MAX_LEN = 1_000_000
"""Context of the scripted engine, long enough that no stream ends during a measurement."""
SUPERVISED = "import sys; from tandem.frontend.cli.main import main; sys.exit(main(sys.argv[1:]))"
MANY = "1000000"


def protocol_version(tree: Path) -> int:
    """Return the wire protocol version of a checkout."""
    found = re.search(r"^PROTOCOL_VERSION = (\d+)", (tree / "protocol" / "version.py").read_text(), re.MULTILINE)
    assert found is not None, f"{tree} is not a checkout of Tandem"
    return int(found[1])


def git_hash(tree: Path) -> str:
    """Return the commit of a checkout, with a "+" if dirty."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def python_path(*folders: Path) -> dict[str, str]:
    """Return PYTHONPATH with these folders prepended."""
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def frontend_command(frontends: int, endpoint: str, model: Path, port: int) -> list[str]:
    """Return the command line of `frontends` frontends under their supervisor."""
    command = [sys.executable, "-P", "-c", SUPERVISED, "frontend", "--frontends", str(frontends)]
    command += ["--endpoint", endpoint, "--model-dir", str(model), "--port", str(port)]
    command += ["--max-concurrent", "8192", "--max-queued-tokens", MANY, "--log-level", "warning"]
    return [*command, "--served-model-name", SERVED_NAME]


def await_ready(address: tuple[str, int], processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Wait until a server is ready. Raises RuntimeError if one of its processes exits."""
    deadline = time.monotonic() + READY_SECONDS
    while answer(address, "/health/ready")[0] != 200:
        ended = [process.returncode for process in processes if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise RuntimeError(f"no answer within {READY_SECONDS:g} s, or an early end: {ended}")
        time.sleep(0.1)


class Deployment:
    """Context manager that runs a scripted engine and `tandem frontend --frontends N` behind one port."""

    def __init__(self, tree: Path, script: Script, frontends: int = 1, flags: tuple[str, ...] = ()) -> None:
        self.address = ("127.0.0.1", free_port())
        self.journal = Journal([], {}, {})
        """Messages the engine sent; filled on exit."""
        self._tree = tree
        self._script = script
        self._frontends = frontends
        self._flags = flags
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Deployment":
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-")))
        self._folder, self._log = folder, folder / "log"
        endpoint = f"ipc://{folder}/engine"
        version = protocol_version(self._tree) if self._tree != ROOT else None
        script = Script(self._script.tokens_per_second, journal=str(folder / "journal"), protocol_version=version)
        engine = [sys.executable, "-P", "-m", "tests.fakes.scripted_engine", "--endpoint", endpoint]
        engine += ["--max-len", str(MAX_LEN), "--max-waiting", "8192", *_engine_limits(), "--log-level", "warning"]
        self._start(engine, python_path(ROOT / "src", ROOT) | script.environment())
        frontend = [*frontend_command(self._frontends, endpoint, MODEL, self.address[1]), *self._flags]
        self._start(frontend, python_path(self._tree / "src"))
        try:
            await_ready(self.address, self._processes)
        except RuntimeError as error:
            said = self._log.read_text()
            self._stop()
            raise RuntimeError(f"the server of {self._tree} did not come up:\n{said}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def cpu(self) -> float:
        """Return the CPU seconds of the frontends with their supervisor and helper processes."""
        _, root = self._processes
        return sum(cpu_seconds(process.pid) for process in family(root.pid))

    def engine_cpu(self) -> float:
        """Return the CPU seconds of the scripted engine."""
        return cpu_seconds(self._processes[0].pid)

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        with self._log.open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment}, cwd=self._folder
                )
            )

    def _stop(self) -> None:
        for process in reversed(self._processes):
            stop_process(process, STOP_SECONDS)
        if (path := self._folder / "journal").exists():
            self.journal = Journal.read(path)
        self._stack.close()


def _engine_limits() -> list[str]:
    """Return the flags that raise the engine's load limits, as far as the checkout has them."""
    from tandem.protocol.engine_options import EngineOptions

    known = EngineOptions.__struct_fields__
    limits = {"max_concurrent": "8192", "max_queued_tokens": MANY}
    return [part for name, value in limits.items() if name in known for part in (f"--{name.replace('_', '-')}", value)]
