"""`tandem bench` against a frontend and a fake engine: counts, not times."""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from msgspec import structs

from tandem.frontend.cli.bench import ready_check
from tandem.frontend.cli.bench.client import Job
from tandem.frontend.cli.bench.clients import Clients
from tandem.frontend.cli.bench.command import load_of, workload_of
from tandem.frontend.cli.bench.completion import Dialect
from tandem.frontend.cli.bench.connection import Endpoint
from tandem.frontend.cli.bench.ready_check import wait_for_model
from tandem.frontend.cli.bench.workloads import Load, Span, Workload
from tandem.frontend.cli.main import build_parser, main
from tandem.frontend.cli.trust import Trust
from tandem.frontend.progress import Progress
from tests.fakes.engine import FakeEngine
from tests.fakes.http_server import Answer, scripted_server
from tests.frontend.conftest import RunningServer
from tests.support.certificate import write_certificate
from tests.support.shared_frontend import SharedFrontend, shared_fixtures

LOADING = """
import os, signal
from tandem.frontend.cli.bench.clients import Clients
if __name__ == "__main__":
    with Clients(2) as clients:
        for process in clients._processes:
            os.kill(process.pid, signal.SIGINT)
    print([process.exitcode for process in clients._processes])
"""
WAITING = """
import sys
from tandem.frontend.cli.bench.client import Job
from tandem.frontend.cli.bench.clients import Clients
from tandem.frontend.cli.bench.completion import Dialect
from tandem.frontend.cli.bench.connection import Endpoint
from tandem.frontend.cli.bench.workloads import Load, Span, Workload
from tandem.frontend.progress import Progress
workload = Workload(0, Span(5, 5), Span(7, 7), Span(10, 20))
job = Job([Endpoint.parse(sys.argv[1])], Dialect("any"), workload, Load("bench", 1, requests=1), 300.0)
with Clients(1) as clients:
    clients.run(job, Progress("bench", 1))
"""
SHAPE = ["--random-input-len", "5", "--random-output-len", "7", "--clients", "1"]

shared, engine, server = shared_fixtures()


def bench(server: RunningServer, *flags: str) -> int:
    return main(["bench", "--url", server.url, *SHAPE, *flags])


def rows_of(text: str) -> dict[str, str]:
    """Return the figures of a table by their names."""
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def test_bench_prints_and_saves_figures_by_the_names_of_vllm(
    server: RunningServer, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--save-result", "--result-dir", str(tmp_path / "new"), "--result-filename", "results.json"]
    metrics = ["--percentile-metrics", "ttft,itl,e2el", "--metric-percentiles", "50,99.5"]
    load = ["--num-prompts", "10", "--max-concurrency", "4", "--goodput", "ttft:100000", "e2el:100000"]
    assert bench(server, *load, *flags, *metrics) == 0
    printed = capsys.readouterr().out
    rows = rows_of(printed)
    assert rows["Successful requests"] == "10" and rows["Failed requests"] == "0"
    assert rows["Maximum request concurrency"] == "4" and rows["Total generated tokens"] == "70"
    assert rows["Request goodput (req/s)"] == rows["Request throughput (req/s)"]
    assert {"Output token throughput (tok/s)", "Total token throughput (tok/s)", "Mean TTFT (ms)"} < set(rows)
    assert {"Median ITL (ms)", "P99.5 ITL (ms)", "P50 E2EL (ms)"} < set(rows) and "TPOT" not in printed
    assert len(engine.submits) == 10
    saved = json.loads((tmp_path / "new" / "results.json").read_text())
    assert (saved["completed"], saved["failed"], saved["total_output_tokens"]) == (10, 0, 70)
    assert (saved["total_input_tokens"], saved["request_rate"], saved["max_concurrency"]) == (50, "inf", 4)
    assert f"{saved['p99.5_itl_ms']:.2f}" == rows["P99.5 ITL (ms)"] and saved["mean_tpot_ms"] >= 0


def test_figures_are_printed_where_their_file_cannot_be_written(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    flags = ["--save-result", "--result-dir", str(tmp_path / "file" / "results")]
    assert bench(server, "--num-prompts", "2", *flags) == 1
    printed = capsys.readouterr()
    assert rows_of(printed.out)["Successful requests"] == "2"
    assert "tandem bench: " in printed.err and str(tmp_path / "file") in printed.err


def test_bench_takes_former_names_of_its_flags(server: RunningServer, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert bench(server, "--num-prompts", "2", "--wait", "30", "--json", str(path)) == 0
    assert json.loads(path.read_text())["completed"] == 2
    shown = build_parser().parse_args(["bench", "--wait", "7"])
    assert shown.ready_check_timeout_sec == 7


def test_bench_sends_every_request_of_a_rate(server: RunningServer, engine: FakeEngine) -> None:
    assert bench(server, "--num-prompts", "6", "--request-rate", "500") == 0
    assert len(engine.submits) == 6


def test_bench_reports_failures_and_exits_with_1(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(server, "--num-prompts", "3", "--model", "nobody") == 1
    failed, first = capsys.readouterr().out.splitlines()
    assert failed == "failed: 3 x HTTP 404" and "HTTP 404: " in first


def test_the_words_of_vllm_bench_serve_are_taken(server: RunningServer) -> None:
    assert main(["bench", "serve", "--base-url", server.url, "--num-prompts", "2"]) == 0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause hardly between the attempts to reach a server."""
    monkeypatch.setattr(ready_check, "_RETRY_SECONDS", 0.02)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("flags", "remedy"), [([], "--ready-check-timeout-sec 300 waits"), (["0.1"], "waited for it")])
def test_bench_without_a_server_says_what_to_start(
    flags: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wait = ["--ready-check-timeout-sec", *flags] if flags else []
    assert main(["bench", "--base-url", "http://127.0.0.1:1", *wait]) == 1
    error = capsys.readouterr().err
    assert "http://127.0.0.1:1" in error and "`tandem serve`" in error and remedy in error


def test_bench_without_the_key_of_a_server_asks_for_it(
    shared: SharedFrontend, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    guarded = RunningServer(structs.replace(shared.config, api_keys=("secret",))).start()
    try:
        assert bench(guarded, "--num-prompts", "3") == 1
        error = capsys.readouterr().err
        assert "/v1/models: " in error and "--api-key" in error
    finally:
        guarded.stop()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>a page</html>", "/v1/models did not answer JSON; give --url the address"),
        (b"\xff", "/v1/models did not answer JSON"),
        (b'{"data": []}', "/v1/models lists no model; give its name with --model"),
        (b"[]", "/v1/models lists no model"),
    ],
)
def test_a_server_of_another_kind_is_told_apart(body: bytes, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other, ThreadPoolExecutor(1) as threads:
        threads.submit(other.serve_forever, 0.05)
        try:
            assert main(["bench", "--url", f"http://127.0.0.1:{other.server_port}"]) == 1
        finally:
            other.shutdown()
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "8001"], "--port is --url here (http://HOST:PORT)"),
        (["--tokenizer", "x"], "--tokenizer: prompts are token ids"),
        (["--num-prompt", "3"], "unknown flag --num-prompt; did you mean --num-prompts?"),
        (["--percentile-metrics", "ttft,e2e"], "'e2e' is not one of ttft, tpot, itl, e2el"),
        (["--metric-percentiles", "50,101"], "'50,101' has a percentile that is not from 0 to 100"),
        (["--goodput", "itl:3"], "'itl:3' is not one of ttft:MS, tpot:MS, e2el:MS"),
    ],
)
def test_flags_that_are_wrong_are_told_what_to_give(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", *flags])
    assert said in capsys.readouterr().err


def test_lengths_vary_by_the_range_ratio() -> None:
    flags = ["--random-input-len", "10", "--random-output-len", "1", "--random-range-ratio", "0.5"]
    workload = workload_of(build_parser().parse_args(["bench", *flags, "--random-prefix-len", "3"]))
    assert (workload.input_len, workload.output_len, workload.shared) == (Span(5, 15), Span(1, 2), 3)


def test_bench_trusts_the_certificates_that_it_is_given(
    shared: SharedFrontend, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = write_certificate(tmp_path)
    secure = RunningServer(structs.replace(shared.config, tls_cert=cert, tls_key=key)).start()
    flags = ["bench", "--url", secure.url.replace("http", "https"), *SHAPE, "--num-prompts", "3"]
    try:
        assert main(flags) == 1
        error = capsys.readouterr().err
        assert "--ca-cert FILE" in error
        assert engine.submits == []
        assert main([*flags, "--ca-cert", str(cert)]) == 0
        assert len(engine.submits) == 3
        assert main([*flags, "--insecure"]) == 0
        assert len(engine.submits) == 6
    finally:
        secure.stop()


def test_ctrl_c_is_left_to_the_parent_of_the_clients(server: RunningServer, engine: FakeEngine) -> None:
    """While a client loads its modules, and between two jobs."""
    workload = Workload(0, Span(5, 5), Span(7, 7), Span(10, 20))
    dialect = Dialect("fake-model")

    def send(clients: Clients, label: str) -> list[str | None]:
        job = Job([Endpoint.parse(server.url)], dialect, workload, Load(label, 1, requests=1), 30.0)
        (share,) = clients.run(job, Progress(label, 1))
        return [record.error for record in share.records]

    with Clients(1) as clients:
        (process,) = clients._processes
        for label in ("first", "second"):
            os.kill(process.pid or 0, signal.SIGINT)
            assert send(clients, label) == [None]
    assert process.exitcode == 0 and len(engine.submits) == 2
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_the_first_clients_of_a_process_take_no_interrupt_while_they_load() -> None:
    """The first start of a process starts multiprocessing's tracker of resources too."""
    ended = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[0, 0]\n", "")


def test_clients_end_with_a_parent_that_is_killed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        parent = subprocess.Popen([sys.executable, "-c", WAITING, url], stdout=subprocess.PIPE)
        try:
            connection, _ = silent.accept()
            connection.settimeout(30)
            assert connection.recv(4) == b"POST"
        finally:
            parent.kill()
        with connection:
            # The client has the same stdout, which ends with the last of both.
            assert parent.communicate(timeout=120)[0] == b""


def test_server_names_its_model(server: RunningServer) -> None:
    assert wait_for_model(server.url, "", Trust().context(), 0.0) == "fake-model"


@pytest.mark.parametrize("status", [404, 405, 501])
def test_server_without_a_list_of_models_is_measured_under_a_given_name(status: int) -> None:
    with scripted_server(Answer(status, b"")) as other:
        assert wait_for_model(other.url, "", Trust().context(), 0.0, "theirs") == "theirs"
        with pytest.raises(ValueError, match=rf"\b{status}\b.*--model\b"):
            wait_for_model(other.url, "", Trust().context(), 0.0)


def test_requests_send_the_user_and_password_of_a_url() -> None:
    with scripted_server(Answer(200, b'{"data": [{"id": "theirs"}]}')) as other:
        assert main(["bench", "--url", other.url.replace("//", "//me:a%2Fb@"), *SHAPE, "--num-prompts", "1"]) == 1
        assert [path for path, _ in other.requests] == ["/v1/models", "/v1/completions"]
        assert {headers["authorization"] for headers in other.headers} == {"Basic bWU6YS9i"}


@pytest.mark.usefixtures("impatient")
def test_password_of_a_url_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://user:secret@127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert "http://user:***@127.0.0.1:1" in error and "secret" not in error


@pytest.mark.parametrize(
    ("flags", "load"),
    [
        ([], Load("bench", 100, requests=1, most=100)),
        (["--num-prompts", "10", "--max-concurrency", "4"], Load("bench", 4, requests=3, most=10)),
        (["--num-prompts", "3", "--max-concurrency", "8"], Load("bench", 3, requests=1, most=3)),
        (["--num-prompts", "9", "--request-rate", "2.5"], Load("bench", rate=2.5, requests=9)),
        (["--num-prompts", "9", "--request-rate", "inf"], Load("bench", 9, requests=1, most=9)),
        (
            ["--num-prompts", "9", "--request-rate", "2", "--max-concurrency", "3"],
            Load("bench", rate=2.0, requests=9, in_flight=3),
        ),
    ],
)
def test_flags_define_the_load(flags: list[str], load: Load) -> None:
    found = load_of(build_parser().parse_args(["bench", *flags]))
    assert found == load
    if found.streams:
        indices = sorted(index for stream in found.streams_of(0, 1) for index in found.indices_of(stream))
        assert indices == list(range(found.total() or 0))


def test_endpoint_takes_https_and_a_key() -> None:
    endpoint = Endpoint.parse("https://host/v1", "secret")
    assert (endpoint.port, endpoint.is_tls, endpoint.path) == (443, True, "/v1/completions")
    assert b"authorization: Bearer secret\r\n" in endpoint.head(2)
    assert b"authorization" not in Endpoint.parse("http://host").head(2)
