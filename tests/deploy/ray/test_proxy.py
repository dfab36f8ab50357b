"""The proxy of a replica, called as Ray calls it, in front of a scripted service on a unix socket."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tandem_ray.proxy import UnixProxy

DEADLINE = 120.0

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def service(path: Path, handler: Handler) -> AsyncIterator[UnixProxy]:
    """Serve on a unix socket; yield a proxy to it."""
    server = await asyncio.start_unix_server(handler, path)
    proxy = UnixProxy(str(path))
    try:
        yield proxy
    finally:
        await proxy.client.aclose()
        server.close()
        await server.wait_closed()


def scope(method: str = "GET", path: str = "/v1/models", **changes: Any) -> dict[str, Any]:
    found = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    return {**found, "headers": [(b"host", b"llm.example")], "client": ("192.0.2.7", 5000), "scheme": "http", **changes}


def body(*parts: bytes) -> Callable[[], Awaitable[dict[str, Any]]]:
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else await asyncio.Event().wait()  # type: ignore[return-value]

    return receive


class Answer:
    """What the proxy sent."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.arrived = asyncio.Event()

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        self.arrived.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not condition():
                self.arrived.clear()
                await self.arrived.wait()


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return head and body of a request with a length or in chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    lower = head.lower()
    if b"content-length: " in lower:
        return head, await reader.readexactly(int(lower.split(b"content-length: ")[1].split(b"\r\n")[0]))
    if b"transfer-encoding: chunked" in lower:
        return head, await reader.readuntil(b"0\r\n\r\n")
    return head, b""


def seen(tmp_path: Path, reply: bytes, asked: dict[str, Any], *parts: bytes) -> tuple[bytes, bytes, Answer]:
    """Pass one request on; return head and body as the service saw them, and the answer."""
    requests: list[tuple[bytes, bytes]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await read_request(reader))
        writer.write(reply)
        await writer.drain()
        writer.close()

    async def run() -> Answer:
        async with service(tmp_path / "http", handler) as proxy:
            answer = Answer()
            await proxy(asked, body(*parts), answer.send)
            return answer

    answer = asyncio.run(run())
    return *requests[0], answer


def test_a_request_reaches_the_service_as_the_client_wrote_it(tmp_path: Path) -> None:
    headers = [
        *((b"host", b"llm.example:8000"), (b"authorization", b"Bearer secret"), (b"x-request-id", b"r-1")),
        *((b"x-forwarded-for", b"198.51.100.1"), (b"connection", b"keep-alive"), (b"content-length", b"6")),
    ]
    asked = scope("POST", "/v1/chat/completions", headers=headers, raw_path=b"/v1/a%2Fb", query_string=b"x=%20&y")
    head, text, _ = seen(tmp_path, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", asked, b"abc", b"def")
    assert head.startswith(b"POST /v1/a%2Fb?x=%20&y HTTP/1.1\r\n")
    assert sorted(head.lower().split(b"\r\n")[1:-2]) == sorted(
        [
            *(b"host: llm.example:8000", b"authorization: bearer secret", b"x-request-id: r-1", b"content-length: 6"),
            *(b"x-forwarded-for: 198.51.100.1", b"x-forwarded-for: 192.0.2.7", b"x-forwarded-proto: http"),
        ]
    )
    assert text == b"abcdef"


def test_a_body_without_a_length_is_passed_on_in_chunks(tmp_path: Path) -> None:
    asked = scope("POST", headers=[(b"host", b"h"), (b"transfer-encoding", b"chunked")])
    _, text, _ = seen(tmp_path, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", asked, b"abc", b"de")
    assert text == b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"


def test_the_prefix_of_the_application_is_left_out(tmp_path: Path) -> None:
    asked = scope(path="/llm/v1/models", root_path="/llm")
    head, _, _ = seen(tmp_path, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", asked)
    assert head.startswith(b"GET /v1/models HTTP/1.1\r\n")


def test_status_headers_and_encoded_body_reach_the_client_unchanged(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"error": {}}')
    reply = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 7\r\nx-a: 1\r\nx-a: 2\r\nx-request-id: r-1\r\n"
    reply += b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n%s" % (len(packed), packed)
    *_, answer = seen(tmp_path, reply, scope())
    start = answer.messages[0]
    assert start["status"] == 429
    assert start["headers"] == [
        *((b"retry-after", b"7"), (b"x-a", b"1"), (b"x-a", b"2"), (b"content-encoding", b"gzip")),
        (b"content-length", b"%d" % len(packed)),
    ]
    assert answer.body == packed
    assert answer.messages[-1]["more_body"] is False


def test_each_chunk_is_sent_on_before_the_next_exists(tmp_path: Path) -> None:
    async def run() -> None:
        go_on = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
            await writer.drain()
            await go_on.wait()
            writer.write(b"4\r\nlast\r\n0\r\n\r\n")
            await writer.drain()
            writer.close()

        async with service(tmp_path / "http", handler) as proxy:
            answer = Answer()
            call = asyncio.create_task(proxy(scope(), body(), answer.send))
            await answer.until(lambda: answer.body == b"first")
            go_on.set()
            await call
            assert answer.body == b"firstlast"
            assert b"transfer-encoding" not in dict(answer.messages[0]["headers"])

    asyncio.run(run())


def test_a_client_that_leaves_closes_the_connection_to_the_service(tmp_path: Path) -> None:
    async def run() -> None:
        closed = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
            await writer.drain()
            if await reader.read() == b"":
                closed.set()
            writer.close()

        async with service(tmp_path / "http", handler) as proxy:
            answer = Answer()
            call = asyncio.create_task(proxy(scope(), body(), answer.send))
            await answer.until(lambda: answer.body == b"first")
            call.cancel()
            async with asyncio.timeout(DEADLINE):
                await closed.wait()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(run())


def test_an_answer_that_breaks_off_is_not_ended_as_if_it_were_whole(tmp_path: Path) -> None:
    reply = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nfour"
    with pytest.raises(httpx.RemoteProtocolError):
        seen(tmp_path, reply, scope())


@pytest.mark.parametrize(
    ("path", "place"),
    [("/v1/chat/completions", ("error", "code")), ("/v1/messages", ("error", "type"))],
    ids=["openai", "anthropic"],
)
def test_a_service_that_is_away_is_503_in_the_shape_of_the_route(
    tmp_path: Path, path: str, place: tuple[str, str]
) -> None:
    async def run() -> Answer:
        proxy, answer = UnixProxy(str(tmp_path / "missing")), Answer()
        await proxy(scope("POST", path), body(), answer.send)
        await proxy.client.aclose()
        return answer

    answer = asyncio.run(run())
    assert answer.messages[0]["status"] == 503
    assert dict(answer.messages[0]["headers"])[b"retry-after"] == b"1"
    said = json.loads(answer.body)
    assert said[place[0]][place[1]] == {"code": "not_ready", "type": "overloaded_error"}[place[1]]
    assert "reached" in said["error"]["message"]
