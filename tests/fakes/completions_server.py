"""A server of completions that streams what it is asked for, or misbehaves."""

import asyncio
import json
from typing import Any

HANG_SECONDS = 60.0


class CompletionsServer:
    """Streams `max_tokens` tokens, three to an event, events cut over HTTP chunks; `ways` tells how to misbehave.

    A way is taken for each request in turn, the last one for all that follow: "good", "refuse" (503), "cut" (closes
    inside the reply), "drop" (a good reply, then closes without having said so), "error" (an error event), "hang".
    """

    def __init__(self, *ways: str) -> None:
        self.ways = list(ways) or ["good"]
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "CompletionsServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return True if the connection can take another one."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        way = self.ways.pop(0) if len(self.ways) > 1 else self.ways[0]
        if way == "hang":
            await asyncio.sleep(HANG_SECONDS)
        if way == "refuse":
            said = b'{"error":{"message":"full"}}'
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said))
            return True
        reply = b"".join(b"data: " + event + b"\n\n" for event in self._events(body, way))
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for at in range(0, len(reply), 50):
            part = reply[at : at + 50]
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await asyncio.sleep(0)
        if way == "cut":
            return False
        writer.write(b"0\r\n\r\n")
        return way != "drop"

    def _events(self, body: dict[str, Any], way: str) -> list[bytes]:
        tokens = body["max_tokens"]
        if way == "error":
            return [b'{"error":{"message":"engine lost"}}', b"[DONE]"]
        events: list[Any] = []
        for at in range(0, tokens, 3):
            choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": "length" if at + 3 >= tokens else None}
            if body.get("return_token_ids"):
                choice["token_ids"] = list(range(at, min(at + 3, tokens)))
            events.append({"choices": [choice]})
        counts = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
        events.append({"choices": [], "usage": counts})
        return [json.dumps(event).encode() for event in events] + [b"[DONE]"]
