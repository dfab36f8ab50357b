"""Scripted HTTP server, for clients that must cope with responses that a correct server never sends."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from msgspec import Struct


class Answer(Struct, frozen=True):
    """One response; `status` 0 closes the connection without one."""

    status: int
    body: bytes = b"{}"
    headers: Mapping[str, str] = {}


class ScriptedServer(ThreadingHTTPServer):
    """Sends the answers in order, repeating the last one, and records the requests."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.requests: list[tuple[str, bytes]] = []
        """Path and body of each request."""
        self.headers: list[Message] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        self.server.requests.append((self.path, self.rfile.read(length)))
        self.server.headers.append(self.headers)
        answer = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        self.close_connection = True
        if answer.status == 0:
            return
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, *_arguments: object) -> None:
        """Log nothing; tests read `requests`."""


@contextmanager
def scripted_server(*answers: Answer) -> Iterator[ScriptedServer]:
    with ScriptedServer(answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="scripted-server")
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
