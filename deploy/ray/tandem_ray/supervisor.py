"""The supervisor of a replica, as a child process."""

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO

from tandem.frontend.process import describe_exit, die_with_parent

_OPS_LINE = re.compile(r"engine metrics on (http://\S+)/metrics")
_KEPT_LINES = 20
_SECONDS_FOR_LAST_WORDS = 2.0
TANDEM = [sys.executable, "-P", "-c", "import sys; from tandem.frontend.cli.main import main; sys.exit(main())"]
"""Command that starts `tandem` of this environment."""


class Supervisor:
    """A `tandem serve` process that ends with this one.

    A thread starts it and lives until it has ended: the kernel's signal to a child whose parent has died (PDEATHSIG)
    comes when the thread that forked ends, not the process.
    """

    def __init__(self, command: Sequence[str], on_exit: Callable[[], None]) -> None:
        """Describe the process without starting it.

        `on_exit` is called from the thread once the process has ended.
        """
        self.ops_url = ""
        """URL of the ops port, once the service has printed it."""
        self.exit_status = ""
        """Description of the exit, such as "exit code 2"; "" until then."""
        self._command = command
        self._on_exit = on_exit
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        """Start the process."""
        self._thread.start()
        self._started.wait()

    @property
    def last_words(self) -> str:
        """The last lines of its output."""
        return "\n".join(self._lines)

    def stop(self) -> None:
        """Terminate the process and wait for its end, which takes its drain."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._process = process = subprocess.Popen(
                die_with_parent(self._command),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            self.exit_status = str(error)
            return
        finally:
            self._started.set()
        # The children have the pipe as well: it may be open for longer than the process runs.
        reader = threading.Thread(target=self._read, args=(process.stdout,), name="supervisor-output", daemon=True)
        reader.start()
        code = process.wait()
        self._on_exit()
        reader.join(_SECONDS_FOR_LAST_WORDS)
        self.exit_status = describe_exit(code)
        reader.join()

    def _read(self, output: IO[str]) -> None:
        """Repeat the output on stderr, which Ray collects, and find the ops port in it."""
        with output:
            for line in output:
                self._lines.append(line.rstrip("\n"))
                print(line, end="", file=sys.stderr, flush=True)
                if not self.ops_url and (found := _OPS_LINE.search(line)):
                    self.ops_url = found[1]


def end_process() -> None:
    """End this replica, without a trace of Python: its service is gone, and Ray starts another at once."""
    sys.stderr.flush()
    os._exit(1)
