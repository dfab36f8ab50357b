"""How the benchmarks end their child processes."""

import signal
import subprocess
import sys

import pytest

from benchmarks.measuring.processes import stop_process

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
POLITE = "import signal; print(flush=True); signal.pause()"


@pytest.mark.parametrize(("program", "seconds", "end"), [(POLITE, 30.0, signal.SIGTERM), (DEAF, 0.01, signal.SIGKILL)])
def test_a_process_that_does_not_end_is_killed(program: str, seconds: float, end: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stop_process(process, seconds)
        assert process.returncode == -end
