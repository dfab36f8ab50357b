"""Clients that send one request after another, do not repeat any, and record what came of each."""

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from itertools import count
from typing import Any

TOKENS = 3
_BODY = {"model": "fake-model", "prompt": "one", "max_tokens": TOKENS}


class Client:
    """One client; `keeps` its connection for as long as the server lets it, or opens one for each request.

    A connection that has ended is noticed before a request is sent on it. A request that was sent is never sent again.
    """

    def __init__(self, address: tuple[str, int], keeps: bool, streams: bool, pause: float, problems: list[str]) -> None:
        self.num_answered = 0
        self.num_connections = 0
        self._address = address
        self._keeps = keeps
        self._streams = streams
        self._pause = pause
        self._problems = problems
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Send requests until it is over."""
        for number in count():
            if is_over():
                break
            try:
                await self._request()
                self.num_answered += 1
            except (OSError, EOFError, ValueError) as error:
                self._problems.append(f"request {number} of its client, keeps={self._keeps}: {error!r}")
                self._hang_up()
            await asyncio.sleep(random.uniform(0, 2 * self._pause))
        self._hang_up()

    async def _request(self) -> None:
        if self._reader is None or self._writer is None or self._reader.at_eof():
            self._hang_up()
            self._reader, self._writer = await asyncio.open_connection(*self._address)
            self.num_connections += 1
        reader, writer = self._reader, self._writer
        body = json.dumps({**_BODY, "stream": self._streams, "stream_options": {"include_usage": True}}).encode()
        if not self._streams:
            body = json.dumps(_BODY).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}"
        )
        writer.write(head.encode() + (b"" if self._keeps else b"\r\nconnection: close") + b"\r\n\r\n" + body)
        status, answered = await _head(reader)
        answer = await _body(reader, answered)
        if answered.get("connection") == "close":
            self._hang_up()
        if status != 200:
            raise ValueError(f"{status}: {answer!r}")
        _check(answer, self._streams)

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    return int(lines[0].split()[1]), dict(line.lower().split(": ", 1) for line in lines[1:] if line)


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return body


def _check(answer: bytes, streams: bool) -> None:
    """Raise ValueError for an answer that is not whole."""
    if not streams:
        found: dict[str, Any] = json.loads(answer)
    else:
        *_, last, done, rest = answer.split(b"\n\n")
        if (done, rest) != (b"data: [DONE]", b"") or b'"error"' in answer:
            raise ValueError(f"the stream is cut: {answer[-300:]!r}")
        found = json.loads(last.removeprefix(b"data: "))
    if found["usage"]["completion_tokens"] != TOKENS:
        raise ValueError(f"not all tokens: {answer[-300:]!r}")


async def run_clients(
    address: tuple[str, int], during: Callable[[], Any], *, num_each: int = 4, pause: float = 0.02
) -> tuple[list[Client], list[str]]:
    """Run clients of every kind until the awaitable of `during` has ended; return them and what went wrong."""
    problems: list[str] = []
    kinds = [(keeps, streams) for keeps in (True, False) for streams in (True, False)]
    clients = [Client(address, keeps, streams, pause, problems) for keeps, streams in kinds for _ in range(num_each)]
    clients.append(Client(address, True, False, 50 * pause, problems))  # mostly idle
    over = asyncio.Event()
    tasks = [asyncio.create_task(client.run(over.is_set)) for client in clients]
    try:
        await during()
    finally:
        over.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*tasks), 120)
    return clients, problems
