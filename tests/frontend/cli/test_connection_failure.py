"""Messages for servers that cannot be talked to, from real sockets and certificates."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.frontend.cli.main import main
from tests.fakes.http_server import Answer, ScriptedServer, scripted_server
from tests.support.certificate import write_certificate

ANSWER = Answer(200, b'data: {"choices": []}\n\ndata: [DONE]\n\n')


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate of 127.0.0.1, with its key in the same file."""
    folder = tmp_path_factory.mktemp("certificate")
    cert, key = write_certificate(folder)
    both = folder / "both.pem"
    both.write_text(cert.read_text() + key.read_text())
    return both


@contextmanager
def secure_server(certificate: Path) -> Iterator[str]:
    """Serve with TLS; yield host and port."""
    with ScriptedServer([ANSWER]) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="secure-server")
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def complete(url: str, *flags: str) -> int:
    return main(["complete", "--model", "m", "--url", url, *flags, "x"])


def test_a_certificate_that_is_not_trusted_is_named_with_its_remedies(
    certificate: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with secure_server(certificate) as place:
        assert complete(f"https://{place}") == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"https://{place} " in line and "--ca-cert FILE" in line and "--insecure" in line
        assert complete(f"https://{place}", "--ca-cert", str(certificate)) == 0
        assert complete(f"https://{place}", "--insecure") == 0
        name = place.replace("127.0.0.1", "localhost")
        assert complete(f"https://{name}", "--ca-cert", str(certificate)) == 1
        error = capsys.readouterr().err
        assert f"https://{name} " in error and "Hostname mismatch" in error


def test_a_batch_does_not_wait_for_a_certificate_that_is_not_trusted(
    certificate: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}'
    (tmp_path / "in").write_text(body)
    files = (str(tmp_path / "in"), str(tmp_path / "out"))
    with secure_server(certificate) as place:
        assert main(["run-batch", "--url", f"https://{place}", *files]) == 1
        assert "--ca-cert FILE" in capsys.readouterr().err
        assert main(["run-batch", "--url", f"https://{place}", "--retries", "0", "--insecure", *files]) == 1
        assert "(200)" in (tmp_path / "out").read_text()


def test_http_and_https_are_told_apart(certificate: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with secure_server(certificate) as place:
        assert complete(f"http://{place}") == 1
        assert f"--url https://{place}" in capsys.readouterr().err
    with scripted_server(Answer(400)) as server:
        url = server.url.replace("http", "https")
        assert complete(url) == 1
        assert f"--url {server.url}" in capsys.readouterr().err


def test_an_unknown_host_and_a_refused_connection_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert complete("http://nowhere.invalid:8000") == 1
    error = capsys.readouterr().err
    assert "'nowhere.invalid'" in error and "--url http://nowhere.invalid:8000" in error
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert complete(url) == 1
    error = capsys.readouterr().err
    assert url in error and "`tandem serve`" in error and "--url" in error


def test_files_without_certificates_are_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("text")
    for path, reason in (
        ("text", "does not hold certificates in PEM format"),
        ("none", "cannot be read: No such file"),
    ):
        with pytest.raises(SystemExit):
            complete("https://127.0.0.1:1", "--ca-cert", str(tmp_path / path))
        assert reason in capsys.readouterr().err
    with pytest.raises(SystemExit):
        complete("https://127.0.0.1:1", "--ca-cert", str(tmp_path / "text"), "--insecure")
