"""`tandem bench` against a frontend and a fake engine: counts, not times."""

import json
from pathlib import Path

import pytest
from msgspec import structs

from tandem.frontend.cli.bench.command import load_of, wait_for_model
from tandem.frontend.cli.bench.connection import Endpoint
from tandem.frontend.cli.bench.workloads import Load
from tandem.frontend.cli.main import build_parser, main
from tandem.frontend.cli.trust import Trust
from tandem.frontend.config import FrontendConfig
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer
from tests.support.certificate import write_certificate

SHAPE = ["--random-input-len", "5", "--random-output-len", "7", "--clients", "1"]


def bench(server: RunningServer, *flags: str) -> int:
    return main(["bench", "--url", server.url, *SHAPE, *flags])


def test_bench_counts_requests_and_tokens(
    server: RunningServer, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.json"
    assert bench(server, "--num-prompts", "10", "--max-concurrency", "4", "--json", str(results)) == 0
    rows = {line[:18].strip(): line[18:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["completed"] == ["10"] and rows["failed"] == ["0"] and rows["output tokens"] == ["70"]
    assert len(engine.submits) == 10
    level = json.loads(results.read_text())
    assert (level["completed"], level["output_tokens"], level["prompt_tokens"]) == (10, 70, 50)
    assert (level["ttft_ms"]["count"], level["e2e_ms"]["count"], level["errors"]) == (10, 10, {})


def test_bench_sends_every_request_of_a_rate(server: RunningServer, engine: FakeEngine) -> None:
    assert bench(server, "--num-prompts", "6", "--request-rate", "500") == 0
    assert len(engine.submits) == 6


def test_bench_reports_failures_and_exits_with_1(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(server, "--num-prompts", "3", "--model", "nobody") == 1
    out = capsys.readouterr().out
    assert "failed: 3 x HTTP 404" in out and "the first: HTTP 404: " in out


def test_bench_without_a_server_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1", "--wait", "0"]) == 1
    error = capsys.readouterr().err
    assert "tandem bench: no server is ready on http://127.0.0.1:1 after 0 s" in error


def test_bench_trusts_the_certificates_that_it_is_given(
    config: FrontendConfig, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = write_certificate(tmp_path)
    engine.start()
    secure = RunningServer(structs.replace(config, tls_cert=cert, tls_key=key)).start()
    flags = ["bench", "--url", secure.url.replace("http", "https"), *SHAPE, "--num-prompts", "3"]
    try:
        assert main(flags) == 1
        error = capsys.readouterr().err
        assert "is not trusted (self-signed certificate)" in error and "--ca-cert FILE" in error
        assert engine.submits == []
        assert main([*flags, "--ca-cert", str(cert)]) == 0
        assert len(engine.submits) == 3
        assert main([*flags, "--insecure"]) == 0
        assert len(engine.submits) == 6
    finally:
        secure.stop()


def test_server_names_its_model(server: RunningServer) -> None:
    assert wait_for_model(server.url, "", Trust().context(), 30.0) == "fake-model"


@pytest.mark.parametrize(
    ("flags", "load"),
    [
        ([], Load("bench", 100, requests=1, most=100)),
        (["--num-prompts", "10", "--max-concurrency", "4"], Load("bench", 4, requests=3, most=10)),
        (["--num-prompts", "3", "--max-concurrency", "8"], Load("bench", 3, requests=1, most=3)),
        (["--num-prompts", "9", "--request-rate", "2.5"], Load("bench", rate=2.5, requests=9)),
    ],
)
def test_flags_define_the_load(flags: list[str], load: Load) -> None:
    found = load_of(build_parser().parse_args(["bench", *flags]))
    assert found == load
    if found.streams:
        indices = sorted(index for stream in found.streams_of(0, 1) for index in found.indices_of(stream))
        assert indices == list(range(found.total() or 0))


def test_rate_and_concurrency_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--request-rate", "2", "--max-concurrency", "3"]) == 1
    assert "exclude each other" in capsys.readouterr().err


def test_endpoint_takes_https_and_a_key() -> None:
    endpoint = Endpoint.parse("https://host/v1", "secret")
    assert (endpoint.port, endpoint.is_tls, endpoint.path) == (443, True, "/v1/completions")
    assert b"authorization: Bearer secret\r\n" in endpoint.head(2)
    assert b"authorization" not in Endpoint.parse("http://host").head(2)
