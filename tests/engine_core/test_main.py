"""Process of the engine core: its life and its exit codes."""

import gc
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from tandem.engine_core import __main__ as process
from tandem.engine_core.errors import ConfigError
from tandem.protocol.codec import decode_event, encode, pack_ids, runs
from tandem.protocol.commands import Hello, Submit
from tandem.protocol.curve import make_curve
from tandem.protocol.errors import ErrorCode, ExitCode
from tandem.protocol.events import Failure, Heartbeat, Phase, Ready, StepOutput
from tandem.protocol.params import SamplingParams
from tandem.protocol.sockets import bind_router, connect_dealer, connect_heartbeat, heartbeat_endpoint
from tandem.protocol.version import PROTOCOL_VERSION
from tests.support.model_folder import write_model
from tests.support.tcp_proxy import free_ports
from tests.support.zmq_context import KeepingContext

ROOT = Path(__file__).parents[2]
WAIT_MS = 60_000


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="td-") as folder:
        yield Path(folder)


@pytest.fixture
def context() -> Iterator[Any]:
    context = KeepingContext()
    yield context
    context.destroy(linger=0)


def test_a_shortened_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        process.parse(["--endpoint", "ipc:///nowhere", "--max-row", "4"])
    assert caught.value.code == 2
    assert "--max-row" in capsys.readouterr().err.splitlines()[-1]


def test_garbage_is_collected_once_all_is_imported() -> None:
    program = """
import gc, runpy, sys
sys.argv = ["engine", "--help"]
try:
    runpy.run_module("tandem.engine_core", run_name="__main__")
except SystemExit:
    print(gc.isenabled(), gc.get_freeze_count() > 100_000)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True True"


def event(sock: Any) -> Any:
    assert sock.poll(WAIT_MS), "nothing arrived"
    return decode_event(sock.recv())


def beat(listener: Any, wanted: Callable[[Heartbeat], bool]) -> Heartbeat:
    while True:
        found = event(listener)
        assert isinstance(found, Heartbeat)
        assert found.phase is not Phase.FAILED, found.detail
        if wanted(found):
            return found


@contextmanager
def process_of(argv: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """Run an engine core; kill it in the end if it still runs."""
    command = [sys.executable, "-P", "-m", "tandem.engine_core", *argv]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def test_process_serves_from_start_to_signal(run_dir: Path, context: Any) -> None:
    """It publishes heartbeats, answers Hello, serves, and on SIGTERM ends open requests and exits with 0."""
    write_model(run_dir)
    endpoint = f"ipc://{run_dir}/wire/engine"
    listener = connect_heartbeat(context, heartbeat_endpoint(endpoint))
    flags = ["--model", str(run_dir), "--device", "cpu", "--max-rows", "1", "--threads", "1"]
    with process_of(["--endpoint", endpoint, *flags]) as child:
        ready = beat(listener, lambda found: found.phase is Phase.READY)
        dealer = connect_dealer(context, endpoint)
        dealer.send(encode(Hello(PROTOCOL_VERSION, ready.engine_epoch, "test")))
        answer = event(dealer)
        assert isinstance(answer, Ready)
        assert answer.engine_epoch == ready.engine_epoch
        dealer.send(encode(Submit(1000, pack_ids([5, 6, 7]), SamplingParams(4, temperature=0.0, ignore_eos=True))))
        tokens: list[int] = []
        finished: list[Any] = []
        while not finished:
            output = event(dealer)
            assert isinstance(output, StepOutput)
            tokens += [token for _, run in runs(output) for token in run]
            finished = output.finished
        assert len(tokens) == 4
        done = beat(listener, lambda found: found.stats.requests_finished["length"] == 1 and not found.pending)
        assert done.stats.generation_tokens == 4
        end_with_open_requests(child, dealer)


def end_with_open_requests(child: "subprocess.Popen[str]", dealer: Any) -> None:
    """Check that a frontend whose requests run reads SHUTTING_DOWN before the socket closes."""
    for request_id in range(300):
        dealer.send(encode(Submit(request_id, pack_ids([5]), SamplingParams(60, ignore_eos=True))))
    # The refusal of an empty prompt says that all before it have been read. Those under way when a process ends are
    # lost with its socket, and their frontend submits them to the next engine.
    dealer.send(encode(Submit(300, b"", SamplingParams(60))))
    finished: list[int] = []
    refused: list[Failure] = []
    while not refused:
        output = event(dealer)
        assert isinstance(output, StepOutput)
        refused += output.failures
        finished += [end.request_id for end in output.finished]
    assert [(failure.request_id, failure.code) for failure in refused] == [(300, ErrorCode.INVALID_VALUE)]
    child.send_signal(signal.SIGTERM)
    _, log = child.communicate(timeout=120)
    assert child.returncode == ExitCode.OK, log
    failures: list[Failure] = []
    # What comes beyond all ends is looked for, though it need not have arrived.
    while dealer.poll(100 if len(finished) + len(failures) >= 300 else WAIT_MS, zmq.POLLIN):
        output = decode_event(dealer.recv())
        assert isinstance(output, StepOutput)
        failures += output.failures
        finished += [end.request_id for end in output.finished]
    assert {failure.code for failure in failures} == {ErrorCode.SHUTTING_DOWN}
    ended = sorted([*finished, *(failure.request_id for failure in failures)])
    assert ended == list(range(300)), "each of the requests that were sent ended exactly once"


def run_main(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["engine_core", *argv])
    return process.main()


def said(caplog: pytest.LogCaptureFixture) -> str:
    """Return what the log has since the last call: why a child process ends is a line of the service's log."""
    text = caplog.text
    caplog.clear()
    return text


class TestExitCodes:
    def test_an_engine_without_a_list_of_frontends_exits_with_config(
        self, run_dir: Path, monkeypatch: Any, caplog: Any
    ) -> None:
        make_curve(run_dir)
        (run_dir / "clients").rmdir()
        wire = ["--endpoint", f"tcp://127.0.0.1:{free_ports(2)}", "--curve-keys", str(run_dir)]
        assert run_main(monkeypatch, *wire, "--model", str(run_dir / "none")) == ExitCode.CONFIG
        assert "--curve-any-client" in said(caplog)
        assert run_main(monkeypatch, *wire, "--curve-any-client", "--model", str(run_dir / "none")) == ExitCode.CONFIG
        assert "--curve-any-client" not in said(caplog)

    def test_an_engine_with_a_list_of_frontends_stops_its_authenticator(
        self, run_dir: Path, monkeypatch: Any, caplog: Any
    ) -> None:
        make_curve(run_dir)
        wire = ["--endpoint", f"tcp://127.0.0.1:{free_ports(2)}", "--curve-keys", str(run_dir)]
        assert run_main(monkeypatch, *wire, "--model", str(run_dir / "none")) == ExitCode.CONFIG
        assert "none" in said(caplog)
        assert not [thread.name for thread in threading.enumerate() if thread.name == "authenticator"]

    def test_missing_model_exits_with_config(self, run_dir: Path, monkeypatch: Any, caplog: Any) -> None:
        code = run_main(monkeypatch, "--endpoint", f"ipc://{run_dir}/engine", "--model", str(run_dir / "none"))
        assert code == ExitCode.CONFIG
        assert "config.json" in said(caplog)

    def test_each_setting_that_is_wrong_has_a_line_of_the_log(
        self, run_dir: Path, monkeypatch: Any, caplog: Any
    ) -> None:
        write_model(run_dir)
        flags = [
            "--device",
            "cpu",
            "--kv-memory",
            "1",
            "--kv-tokens",
            "4",
            "--batching",
            "static",
            "--policy",
            "priority",
        ]
        code = run_main(monkeypatch, "--endpoint", f"ipc://{run_dir}/engine", "--model", str(run_dir), *flags)
        assert code == ExitCode.CONFIG
        told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert [re.findall(r"--[a-z-]+", line)[:2] for line in told] == [
            ["--kv-memory", "--kv-tokens"],
            ["--batching", "--policy"],
        ]

    def test_endpoint_in_use_exits_with_config(
        self, run_dir: Path, context: Any, monkeypatch: Any, caplog: Any
    ) -> None:
        endpoint = f"ipc://{run_dir}/engine"
        bind_router(context, endpoint)
        assert run_main(monkeypatch, "--endpoint", endpoint) == ExitCode.CONFIG
        assert "already listens" in said(caplog)

    @pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5599", "nonsense", "ipc://{dir}/file/engine"])
    def test_impossible_endpoint_exits_with_config(
        self, run_dir: Path, endpoint: str, monkeypatch: Any, caplog: Any
    ) -> None:
        """The supervisor restarts an engine that ended with FATAL, which would not help here."""
        (run_dir / "file").write_text("")
        code = run_main(monkeypatch, "--endpoint", endpoint.format(dir=run_dir))
        assert code == ExitCode.CONFIG
        assert "endpoint" in said(caplog)

    def test_missing_endpoint_is_a_usage_error(self, monkeypatch: Any, capsys: Any) -> None:
        with pytest.raises(SystemExit) as caught:
            run_main(monkeypatch)
        assert caught.value.code == 2
        assert "--endpoint" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("error", "code"), [(RuntimeError("device lost"), ExitCode.FATAL), (ConfigError("too small"), ExitCode.CONFIG)]
    )
    def test_failed_start_is_published_and_closed(
        self, run_dir: Path, context: Any, monkeypatch: Any, error: Exception, code: ExitCode
    ) -> None:
        endpoint = f"ipc://{run_dir}/engine"
        listener = connect_heartbeat(context, heartbeat_endpoint(endpoint))

        def fail(*_args: Any, **_: Any) -> None:
            assert listener.poll(WAIT_MS), "it does not beat while it loads"
            raise error

        monkeypatch.setattr(process, "build_engine", fail)
        assert run_main(monkeypatch, "--endpoint", endpoint) == code
        found = event(listener)
        while found.phase is not Phase.FAILED:
            found = event(listener)
        assert found.detail == str(error)


@pytest.fixture
def collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("collector")
def test_nothing_from_the_start_is_collected_while_requests_run(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection would stop all streams for some 40 ms."""
    generations: list[int] = []

    def note(_phase: str, info: dict[str, int]) -> None:
        generations.append(info["generation"])

    def run() -> None:
        assert gc.get_freeze_count() > 10_000
        gc.callbacks.append(note)
        kept = [[number] for number in range(300_000)]
        gc.callbacks.remove(note)
        assert len(kept) == 300_000

    monkeypatch.setattr(process, "build_engine", lambda *_, **__: SimpleNamespace(run=run, stopping=False))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert run_main(monkeypatch, "--endpoint", f"ipc://{run_dir}/engine") == ExitCode.OK
    assert generations, "the youngest generation is still collected"
    assert 2 not in generations
