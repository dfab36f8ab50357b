"""Collector of traces that keeps what it gets over OTLP/HTTP."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(ThreadingHTTPServer):
    """Answers each export with `status`, and keeps the spans of those that it takes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.status = 200
        self.paths: list[str] = []
        self.spans: list[Any] = []
        self.services: set[str] = set()

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def within(self, parent: Any, name: str = "") -> list[Any]:
        """Return the children of a span in the order of their starts, all or those of a name."""
        found = [span for span in self.spans if span.parent_span_id == parent.span_id]
        assert all(span.trace_id == parent.trace_id for span in found)
        return sorted([span for span in found if not name or span.name == name], key=lambda s: s.start_time_unix_nano)


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.paths.append(self.path)
        if self.server.status == 200:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.server.services.add(values(resource.resource.attributes)["service.name"])
                for scope in resource.scope_spans:
                    self.server.spans += scope.spans
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""


def values(pairs: Any) -> dict[str, Any]:
    """Return attributes as a dictionary of plain values."""
    found = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def attributes(span: Any) -> dict[str, Any]:
    return values(span.attributes)


@contextmanager
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="collector")
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
