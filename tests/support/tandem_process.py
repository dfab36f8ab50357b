"""A `tandem` command as a process, with a program of the test's as its engine core."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.fakes.tokenizer import write_tokenizer
from tests.frontend.conftest import DEADLINE, until
from tests.support.tandem_with_fake_engine import write_tandem

SERVING = """
import sys
from pathlib import Path
from tests.fakes.engine import run_as_process
engine = run_as_process(sys.argv)
Path("last_words").write_text(f"goodbyes {engine.goodbyes}")
"""
"""Program of a fake engine core, which leaves the number of goodbyes that it heard in a file."""


class Tandem:
    """A `tandem` process and the lines that it has printed."""

    def __init__(self, folder: Path, python_path: str, *flags: str) -> None:
        environment = {**os.environ, "PYTHONPATH": python_path, "PYTHONWARNINGS": "default"}
        self.folder = folder
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                "import sys; from tandem.frontend.cli.main import main; sys.exit(main())",
                *flags,
            ],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def find(self, pattern: str) -> re.Match[str]:
        """Wait for a line of this pattern."""
        until(lambda: re.search(pattern, self.output) or self.process.poll() is not None, pattern)
        if self.process.poll() is not None:
            self.reader.join(DEADLINE)
        match = re.search(pattern, self.output)
        assert match is not None, self.output
        return match

    def url(self) -> str:
        return self.find(r"tandem is ready on (http://\S+) \(model fake-model, cpu, 65536 KV tokens, [\d.]+ s\)")[1]

    def ops_url(self) -> str:
        return self.find(r"engine metrics on (http://\S+)/metrics")[1]

    def child(self, module: str) -> psutil.Process:
        """Wait for the running child process of `-m module`."""
        until(lambda: len(self.children(module)) == 1, f"one child runs {module}")
        return self.children(module)[0]

    def children(self, module: str) -> list[psutil.Process]:
        """Return the running child processes of `-m module`."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):  # a zombie, or gone since it was listed
                if module in child.cmdline():
                    found.append(child)
        return found

    def wait(self) -> int:
        """Wait for the end of the process, and for what it printed last."""
        code = self.process.wait(DEADLINE)
        self.reader.join(DEADLINE)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE)
        self.reader.join(DEADLINE)
        assert self.process.stdout is not None
        self.process.stdout.close()


Start = Callable[..., Tandem]


class TandemFolder:
    """Folder of a package whose engine core is a program of the test's, and the commands that run it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Tandem] = []
        self._python_path = ""

    def start(self, program: str, *flags: str, frontend: str | None = None) -> Tandem:
        """Start `tandem` with this program as its engine core."""
        if not self._python_path:
            self._python_path = write_tandem(self.folder, program, frontend)
            model = self.folder / "tandem" / "engine_core" / "default_model"
            if not model.exists():
                model.mkdir()
                write_tokenizer(model)
        self.started.append(Tandem(self.folder, self._python_path, *flags))
        return self.started[-1]

    def close(self) -> None:
        for process in self.started:
            process.close()
