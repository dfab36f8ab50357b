"""`tandem serve` as a process, with a fake engine core."""

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tandem.frontend.process import ManagedProcess
from tandem.frontend.supervisor.restart_policy import MAX_FAILED_STARTS
from tandem.frontend.supervisor.supervisor import REPEATED_SIGNAL_SECONDS
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import get, open_stream, post, until
from tests.support.scrape import value
from tests.support.serving import free_port
from tests.support.stopped_process import stop_process
from tests.support.tandem_process import SERVING, Start, Tandem

HANGING_ONCE = """
import sys
from pathlib import Path
from tests.fakes import engine
hangs = not Path("hung").exists()
Path("hung").touch()
class Engine(engine.FakeEngine):
    def __init__(self, endpoint):
        super().__init__(endpoint)
        self.hold = hangs
engine.FakeEngine = Engine
engine.run_as_process(sys.argv)
"""

STREAMING = """
import sys
from pathlib import Path
from tests.fakes import engine
class Engine(engine.FakeEngine):
    @property
    def hold(self):
        return self.stats.steps_committed > 0 and not Path("go_on").exists()
    @hold.setter
    def hold(self, _):
        pass
engine.FakeEngine = Engine
engine.run_as_process(sys.argv)
"""
"""Program of a fake engine core whose streams stay open after their first token until a file tells to go on."""

CRASHING = """
import sys, time
from pathlib import Path
from tests.fakes.engine import FakeEngine
from tandem.protocol.events import Phase
engine = FakeEngine(sys.argv[sys.argv.index("--endpoint") + 1])
engine.phase, engine.detail = Phase.FAILED, "no kernel image for this GPU"
engine.start()
while not Path(str(engine.epoch)).exists():
    time.sleep(0.01)
engine.die()
sys.exit(70)
"""
"""Program of a fake engine core that fails while it starts, and ends once a file has the name of its epoch."""

BROKEN_FRONTEND = "raise SystemExit(5)"

IMPOSSIBLE = """
import sys
print("max_len 5 is below 16; raise --max-len", file=sys.stderr)
sys.exit(2)
"""


SERVE = ("serve", "--port", "0", "--ops-port", "0", "--drain-timeout", "2")


def complete(url: str) -> httpx.Response:
    body = {"model": "fake-model", "prompt": "one two three", "max_tokens": 4}
    return post(url + "/v1/completions", json=body)


def test_serve_uses_the_default_model_and_stops_in_order(tandem: Start) -> None:
    process = tandem(SERVING, *SERVE)
    assert complete(process.url()).status_code == 200
    mapped = Path(f"/proc/{process.child('tandem.frontend').pid}/maps").read_text()
    assert "tokenizers" in mapped
    assert "torch" not in mapped
    metrics = get(process.ops_url() + "/metrics").text
    assert "tandem_engine_up 1.0" in metrics
    assert value(metrics, "tandem_engine_restarts_total") == 0
    assert get(process.ops_url() + "/health").json()["status"] == "ready"
    process.process.send_signal(signal.SIGTERM)
    assert process.wait() == 0, process.output
    # The frontend said goodbye before the engine was told to stop.
    assert (process.folder / "last_words").read_text() == "goodbyes 1"
    assert "Traceback" not in process.output


def test_start_prints_addresses_in_one_block(tandem: Start) -> None:
    port = free_port()
    process = tandem(SERVING, "serve", "--port", "0", "--ops-port", str(port))
    url = process.url()
    process.find(
        rf"tandem is ready on {url} \(model .*\)\n  playground  {url}/\n  metrics     http://127.0.0.1:{port}/metrics\n"
    )
    assert "engine metrics on" not in process.output, "the port is known"
    assert process.output.count(f":{port}") == 1


def test_a_dead_process_is_restarted_without_the_other(tandem: Start) -> None:
    process = tandem(SERVING, *SERVE)
    url = process.url()
    engine, frontend = process.child("tandem.engine_core"), process.child("tandem.frontend")
    engine.kill()
    await_next_engine(process, url)
    assert complete(url).status_code == 200
    assert process.child("tandem.frontend").pid == frontend.pid
    restarted = process.child("tandem.engine_core")
    assert restarted.pid != engine.pid
    frontend.kill()
    # The listening socket is the supervisor's: the request waits in it for the next frontend.
    assert complete_when_ready(url).status_code == 200
    assert process.child("tandem.engine_core").pid == restarted.pid
    assert value(get(process.ops_url() + "/metrics").text, 'tandem_engine_restarts_total{reason="exit"}') == 1


def is_ready(url: str) -> bool:
    """Return False also for a frontend that accepts no connection."""
    try:
        return get(url + "/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def await_next_engine(process: Tandem, url: str) -> None:
    """Wait until the frontend is ready again: before it has lost the old engine, it is ready for that one."""
    process.find("lost the engine of epoch")
    until(lambda: is_ready(url), "the frontend finds the new engine")


def complete_when_ready(url: str) -> httpx.Response:
    def serves() -> bool:
        try:
            return complete(url).status_code == 200
        except httpx.TransportError:
            return False

    until(serves, "the new frontend serves")
    return complete(url)


def test_a_silent_engine_is_restarted(tandem: Start) -> None:
    process = tandem(SERVING, *SERVE, "--hang-timeout", "4")
    url = process.url()
    engine = process.child("tandem.engine_core")
    engine.suspend()
    process.find(f"the engine core, process {engine.pid}, is killed: no heartbeat from the engine")
    await_next_engine(process, url)
    assert process.child("tandem.engine_core").pid != engine.pid
    assert complete(url).status_code == 200


def test_a_hung_engine_is_restarted(tandem: Start) -> None:
    process = tandem(HANGING_ONCE, *SERVE, "--step-timeout", "3")
    url = process.url()
    engine = process.child("tandem.engine_core")
    assert complete(url).status_code == 200, "the request is submitted to the next engine"
    process.find(f"the engine core, process {engine.pid}, is killed: the engine made no step")
    until(lambda: get(url + "/health/ready").status_code == 200, "the frontend finds the new engine")
    assert complete(url).status_code == 200


def test_processes_start_without_python_between_fork_and_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    start = asyncio.create_subprocess_exec

    async def spy(*argv: str, **options: Any) -> asyncio.subprocess.Process:
        given.update(options)
        return await start(*argv, **options)

    async def run(process: ManagedProcess) -> int:
        await process.start()
        return await process.wait()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spy)
    assert asyncio.run(run(ManagedProcess("child", [sys.executable, "-c", "raise SystemExit(2)"]))) == 2
    assert "preexec_fn" not in given


def test_an_engine_that_refuses_its_settings_stops_the_supervisor(tandem: Start) -> None:
    process = tandem(IMPOSSIBLE, *SERVE)
    assert process.wait() == 2
    assert process.output == "max_len 5 is below 16; raise --max-len\n", "its reason is all that is printed"


def let_fail(process: Tandem, ops_port: str) -> None:
    """Wait until the supervisor has the reason of an engine's failure, then let that engine end."""

    def ends() -> bool:
        try:
            told = get(f"http://127.0.0.1:{ops_port}/health").json()
        except httpx.TransportError:
            return False
        word = process.folder / str(told["epoch"])
        if told["phase"] != "failed" or word.exists():
            return False
        word.touch()
        return True

    until(ends, "the reason of the failure")


def test_an_engine_that_cannot_start_is_given_up_with_its_reason(tandem: Start) -> None:
    ops_port = str(free_port())
    process = tandem(CRASHING, *SERVE, "--ops-port", ops_port)
    let_fail(process, ops_port)
    process.find(r"exit code 70; restarting it in 0\.5 s")
    let_fail(process, ops_port)
    process.find(r"exit code 70; restarting it in 1\.0 s")
    let_fail(process, ops_port)
    process.find(r"\b3 times\b.* exit code 70: no kernel image for this GPU;")
    assert process.wait() == 70
    assert process.output.count("restarting it in") == 2
    assert "Traceback" not in process.output


def test_a_frontend_that_cannot_start_is_given_up_though_the_engine_runs(tandem: Start) -> None:
    process = tandem(SERVING, *SERVE, frontend=BROKEN_FRONTEND)
    process.find("frontend-0 failed to start 3 times in a row with exit code 5;")
    assert process.wait() == 70


@pytest.mark.slow
def test_processes_that_were_ready_are_restarted_each_time(tandem: Start) -> None:
    process = tandem(SERVING, *SERVE, "--log-level", "debug")
    url = process.url()
    for name, module in (("the engine core", "tandem.engine_core"), ("frontend-0", "tandem.frontend")):
        for _ in range(MAX_FAILED_STARTS):
            child = process.child(module)
            process.find(f"{name}, process {child.pid}, is ready")
            child.kill()
            psutil.wait_procs([child])
    assert complete_when_ready(url).status_code == 200


def test_processes_end_with_a_killed_supervisor(tandem: Start) -> None:
    process = tandem(SERVING, *SERVE)
    process.url()
    children = [process.child("tandem.engine_core"), process.child("tandem.frontend")]
    process.process.kill()
    _, alive = psutil.wait_procs(children)
    assert alive == []


def test_the_engine_command_serves_the_ops_port(tandem: Start, ipc_dir: Path) -> None:
    process = tandem(SERVING, "engine", "--ops-port", "0", "--endpoint", f"ipc://{ipc_dir}/e")
    process.find("the engine is ready")
    assert "tandem_engine_ready 1.0" in get(process.ops_url() + "/metrics").text
    process.find(rf"the engine is ready \(.*\)\n  endpoint    ipc://{ipc_dir}/e\n  metrics     http://\S+/metrics\n")
    process.process.send_signal(signal.SIGINT)
    assert process.wait() == 0, process.output


@contextmanager
def open_sequence(process: Tandem) -> Iterator[Iterator[bytes]]:
    """Open a stream that the supervisor knows of; yield what follows its first bytes."""
    body = {"model": "fake-model", "prompt": "one", "max_tokens": 200, "stream": True}
    with open_stream("POST", process.url() + "/v1/completions", json=body) as response:
        chunks = response.iter_raw()
        next(chunks)
        metrics = process.ops_url() + "/metrics"
        until(lambda: value(get(metrics).text, "tandem_num_requests_running") == 1, "a heartbeat tells of it")
        yield chunks


def send_twice(process: Tandem) -> None:
    """Send a signal twice; the process gets both when it goes on, however late the second is sent."""
    stop_process(process.process.pid)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        process.process.send_signal(number)


def test_a_second_signal_ends_what_is_open_with_an_error(tandem: Start) -> None:
    """Also one that is sent twice at once."""
    process = tandem(STREAMING, *SERVE[:-1], "60")
    with open_sequence(process) as chunks:
        process.process.send_signal(signal.SIGTERM)
        process.find("stopping: waiting up to 60 s for 1 sequences in progress; interrupt again to stop at once")
        time.sleep(2 * REPEATED_SIGNAL_SECONDS)
        send_twice(process)
        process.find("interrupted again: open requests end with an error; once more kills all processes")
        assert b'"code":"shutting_down"' in b"".join(chunks)
        assert process.wait() == 130


def test_a_third_signal_kills_all_processes(tandem: Start) -> None:
    process = tandem(STREAMING, *SERVE[:-1], "60")
    with open_sequence(process):
        stop_process(process.child("tandem.frontend").pid)  # which ends nothing
        for line in (
            "stopping: waiting up to 60 s",
            "interrupted again: open requests end with an error",
            "interrupted again: all processes that are left are killed",
        ):
            process.process.send_signal(signal.SIGTERM)
            process.find(line)
            time.sleep(2 * REPEATED_SIGNAL_SECONDS)
        assert process.wait() == 130


def test_a_signal_that_is_sent_twice_at_once_still_drains(tandem: Start) -> None:
    process = tandem(STREAMING, *SERVE[:-1], "60")
    with open_sequence(process) as chunks:
        send_twice(process)
        process.find("stopping: waiting up to 60 s for 1 sequences in progress; interrupt again to stop at once")
        process.find("a signal within 0.5 s of the one before counts as the same, .*; interrupt again if it was meant")
        (process.folder / "go_on").touch()
        assert b"".join(chunks).endswith(b"data: [DONE]\n\n")
    assert process.wait() == 0


def test_a_frontend_says_what_it_waits_for_where_it_listens_and_when_it_is_ready(
    tandem: Start, ipc_dir: Path, model_dir: Path, engine: FakeEngine
) -> None:
    endpoint = f"ipc://{ipc_dir}/engine"
    process = tandem(SERVING, "frontend", "--port", "0", "--endpoint", endpoint, "--model", str(model_dir))
    process.find(f"tandem frontend waits for the engine at {endpoint}\n")
    url = process.find(r"tandem frontend listens on (http://127\.0\.0\.1:\d+)")[1]
    until(lambda: get(url + "/health/live").status_code == 200, "it answers there")
    assert "ready" not in process.output
    engine.start()
    process.find(
        rf"tandem frontend is ready on {url}\n  playground  {url}/\n  metrics     http://127.0.0.1:\d+/metrics\n"
    )
    assert process.output.count(url) == 3
    assert process.output.count("waits for the engine") == 1
