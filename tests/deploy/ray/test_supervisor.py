"""The child process of a replica, with programs of the test's in place of `tandem`."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest
from tandem_ray.supervisor import Supervisor

from tests.frontend.conftest import DEADLINE, until

SERVES = "import time; print('engine metrics on http://127.0.0.1:41/metrics, endpoint x', flush=True); time.sleep(600)"


def run(program: str) -> tuple[Supervisor, threading.Event]:
    """Start a program; return it, and an event of its exit."""
    ended = threading.Event()
    supervisor = Supervisor([sys.executable, "-I", "-S", "-c", program], ended.set)
    # The thread that starts it ends at once: Ray calls from any thread.
    starter = threading.Thread(target=supervisor.start)
    starter.start()
    starter.join()
    return supervisor, ended


@pytest.fixture
def serving() -> Iterator[tuple[Supervisor, threading.Event]]:
    supervisor, ended = run(SERVES)
    yield supervisor, ended
    supervisor.stop()


def test_the_process_outlives_the_thread_that_asked_for_it(serving: tuple[Supervisor, threading.Event]) -> None:
    supervisor, ended = serving
    until(lambda: supervisor.ops_url, "its first line")
    assert supervisor.ops_url == "http://127.0.0.1:41"
    assert not ended.is_set() and supervisor.exit_status == ""


def test_a_stop_terminates_the_process_and_waits_for_its_end(serving: tuple[Supervisor, threading.Event]) -> None:
    supervisor, ended = serving
    until(lambda: supervisor.ops_url, "its first line")
    supervisor.stop()
    assert ended.is_set()
    assert supervisor.exit_status == "signal SIGTERM"
    supervisor.stop()


def test_a_process_that_ends_leaves_its_status_and_its_last_lines() -> None:
    supervisor, ended = run("import sys; [print(n) for n in range(40)]; print('no such model'); sys.exit(2)")
    until(lambda: supervisor.exit_status, "its end")
    assert ended.is_set()
    assert supervisor.exit_status == "exit code 2"
    assert supervisor.last_words.splitlines()[-2:] == ["39", "no such model"]
    assert len(supervisor.last_words.splitlines()) == 20
    supervisor.stop()


def test_an_exit_is_seen_while_a_grandchild_holds_the_output_open() -> None:
    program = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.exit(1)"
    supervisor, ended = run(program)
    assert ended.wait(DEADLINE)
    until(lambda: supervisor.last_words, "its output")
    os.kill(int(supervisor.last_words), signal.SIGKILL)
    supervisor.stop()
    assert supervisor.exit_status == "exit code 1"


def test_the_process_is_killed_with_the_process_of_the_replica() -> None:
    replica = (
        "import sys, time; from tandem_ray.supervisor import Supervisor\n"
        f"supervisor = Supervisor([sys.executable, '-I', '-S', '-c', {SERVES!r}], lambda: None)\n"
        "supervisor.start()\n"
        "while not supervisor.ops_url: time.sleep(0.01)\n"
        "print(supervisor._process.pid, flush=True); time.sleep(600)"
    )
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", replica],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        service = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        until(lambda: not service.is_running() or service.status() == psutil.STATUS_ZOMBIE, "the end of the service")
