"""Server that speaks enough of the Hugging Face hub's API to download models from, with faults on demand."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct, field

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE_BYTES = 1000
"""Size from which on a file is kept apart from git, under its SHA-256, and served by the CDN."""
_RESOLVE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_API = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)(/revision/(?P<revision>.+))?")
_CDN = re.compile(r"/cdn/(?P<name>[^/]+/[^/]+)/(?P<file>.+)")


class Repository(Struct):
    """One model on the hub."""

    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    """Commits by the name of their branch or tag. Every commit has the same files."""
    token: str | None = None
    """Token without which the repository cannot be seen; None for a public one."""
    gate: str | None = None
    """Token without which no file is sent, though the repository can be seen; None for one that is not gated."""


class Seen(Struct, frozen=True):
    """One request that a server got."""

    method: str
    path: str
    token: str
    """Header `authorization`; empty without one."""
    range: str
    """Header `range`; empty without one."""
    server: str
    """hub or cdn."""


class HubServer:
    """A hub and its CDN, which are two hosts, and what tests make them do wrong."""

    def __init__(self, repositories: Mapping[str, Repository]) -> None:
        self.repositories = dict(repositories)
        self.seen: list[Seen] = []
        self.cuts: dict[str, list[int]] = {}
        """Numbers of bytes, by file, after which the connection of the next answers is cut."""
        self.statuses: dict[str, list[int]] = {}
        """Statuses, by file or "list", of the next answers."""
        self.spoiled: set[str] = set()
        """Files that are sent with a wrong first byte."""
        self.more_listed: list[dict[str, Any]] = []
        """Entries of the list of files that are no files of a repository."""
        self.has_ranges = True
        self.hold = threading.Event()
        """While this is not set, the body of a large file stops after its first half."""
        self.hold.set()
        self.hold_statuses = threading.Event()
        """While this is not set, an answer of `statuses` waits."""
        self.hold_statuses.set()
        self._threads: list[threading.Thread] = []
        self._hub, self._cdn = (_server(self, kind) for kind in ("hub", "cdn"))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._hub.server_port}"

    @property
    def cdn_url(self) -> str:
        return f"http://localhost:{self._cdn.server_port}"

    def bodies(self, file: str) -> list[Seen]:
        """Return the requests for the content of a file, where they were answered."""
        return [seen for seen in self.seen if seen.method == "GET" and seen.path.endswith("/" + file)
                and (seen.server == "cdn" or "/resolve/" in seen.path) and not self._is_redirected(seen)]  # fmt: skip

    def lists(self) -> list[Seen]:
        """Return the requests for the list of files."""
        return [seen for seen in self.seen if seen.path.startswith("/api/models/")]

    def _is_redirected(self, seen: Seen) -> bool:
        found = _RESOLVE.fullmatch(seen.path)
        return found is not None and len(self.repositories[found["name"]].files[found["file"]]) >= LARGE_BYTES

    def start(self) -> None:
        for server in (self._hub, self._cdn):
            self._threads.append(threading.Thread(target=server.serve_forever, args=(0.01,), name="hub"))
            self._threads[-1].start()

    def close(self) -> None:
        """Close the ports. Idempotent."""
        self.hold.set()
        self.hold_statuses.set()
        while self._threads:
            for server in (self._hub, self._cdn):
                server.shutdown()
                server.server_close()
                self._threads.pop(0).join()


@contextmanager
def hub_server(repositories: Mapping[str, Repository]) -> Iterator[HubServer]:
    hub = HubServer(repositories)
    hub.start()
    try:
        yield hub
    finally:
        hub.close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_arguments: object) -> None:
        """Ignore clients that hang up, which a cut download does."""


def _server(hub: HubServer, kind: str) -> ThreadingHTTPServer:
    return _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub, "kind": kind}))


def digest_of(content: bytes) -> str:
    """Return the hash under which the hub knows a file."""
    if len(content) >= LARGE_BYTES:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    kind: str
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token, ranged = self.headers.get("authorization", ""), self.headers.get("range", "")
        self.hub.seen.append(Seen(self.command, path, token, ranged, self.kind))
        if self.kind == "cdn":
            found = _CDN.fullmatch(path)
            assert found is not None, path
            self._send_content(found["file"], self.hub.repositories[found["name"]].files[found["file"]])
        elif found := _RESOLVE.fullmatch(path):
            self._resolve(found["name"], found["revision"], found["file"])
        elif found := _API.fullmatch(path):
            self._list(found["name"], found["revision"] or "main")
        else:
            self._refuse(404, "")

    def _list(self, name: str, revision: str) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        if self._fails("list"):
            return
        siblings = list(self.hub.more_listed)
        for file, content in repository.files.items():
            entry: dict[str, Any] = {"rfilename": file, "size": len(content), "blobId": digest_of(content)[:40]}
            if len(content) >= LARGE_BYTES:
                entry["lfs"] = {"size": len(content), "sha256": digest_of(content), "pointerSize": 134}
            siblings.append(entry)
        commit = repository.revisions.get(revision, revision)
        self._send(200, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode())

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        if repository.gate is not None and self.headers.get("authorization") != f"Bearer {repository.gate}":
            self._refuse(403 if "authorization" in self.headers else 401, "GatedRepo")
            return
        if file not in repository.files:
            self._refuse(404, "EntryNotFound")
            return
        content = repository.files[file]
        facts = {"X-Repo-Commit": repository.revisions.get(revision, revision), "ETag": f'"{digest_of(content)}"'}
        if len(content) >= LARGE_BYTES:
            facts |= {
                "X-Linked-Etag": f'"{digest_of(content)}"',
                "X-Linked-Size": str(len(content)),
                "Location": f"{self.hub.cdn_url}/cdn/{name}/{file}",
            }
            self._send(302, b"", facts)
        elif not self._fails(file):
            self._send_content(file, content, facts)

    def _repository(self, name: str, revision: str) -> Repository | None:
        """Return a repository that may be seen; refuse the request otherwise."""
        repository = self.hub.repositories.get(name)
        token = self.headers.get("authorization")
        if token == "Bearer invalid":
            self._send(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repository is None or (repository.token is not None and token != f"Bearer {repository.token}"):
            self._refuse(404 if token else 401, "RepoNotFound")
        elif revision not in repository.revisions and revision not in repository.revisions.values():
            self._refuse(404, "RevisionNotFound")
        else:
            return repository
        return None

    def _fails(self, what: str) -> bool:
        if planned := self.hub.statuses.get(what):
            self.hub.hold_statuses.wait()
            self._send(planned.pop(0), b"")
            return True
        return False

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code})

    def _send_content(self, file: str, content: bytes, facts: Mapping[str, str] = {}) -> None:
        if self.kind == "cdn" and self._fails(file):
            return
        if file in self.hub.spoiled:
            content = bytes([content[0] ^ 1]) + content[1:]
        ranged = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        first = int(ranged[1]) if ranged and self.hub.has_ranges else 0
        if first >= len(content):
            self._send(416, b"")
            return
        if first:
            facts = {**facts, "Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"}
        planned = self.hub.cuts.get(file) if self.command == "GET" else None
        self._send(206 if first else 200, content[first:], facts, planned.pop(0) if planned else None)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] = {}, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut is not None:
            self.wfile.write(body[:cut])
            self.close_connection = True
            return
        if self.kind == "cdn":
            self.wfile.write(body[: len(body) // 2])
            self.hub.hold.wait()
            body = body[len(body) // 2 :]
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Log nothing; tests read `seen`."""
