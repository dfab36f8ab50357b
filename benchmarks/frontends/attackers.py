"""Attacking clients without an API key, and tenants with one.

An attack sends its bytes over one connection and is repeated.
"""

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

from msgspec import Struct

CHUNK = b"b" * 65536
FIRST = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
TENANT, OTHER = "sk-attacker-0123456789", "sk-another-0123456789"
"""API keys of the attacking tenant and of another one."""
LARGE_BYTES = 31 * 2**20
"""Bytes of a tenant's large item, close to the body limit."""
READ_SECONDS = 1.0
"""Seconds that an attacker waits for an answer once it can send nothing more."""


class Line:
    """Connection of an attacker."""

    def __init__(self, sock: socket.socket, target: str) -> None:
        self._sock = sock
        self.target = target
        """Id of a large stored response of a tenant."""
        self._loop = asyncio.get_running_loop()
        self.answer: bytes | None = None

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._sock, data)

    async def read(self, seconds: float) -> bytes | None:
        """Read once and keep the bytes.

        Returns b"" at the end of the connection, and None if nothing came within the time.
        """
        if self.answer is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    self.answer = await self._loop.sock_recv(self._sock, 4096)
        return self.answer


async def long_header(line: Line) -> None:
    await line.send(FIRST + b"a: ")
    for _ in range(200 * 2**20 // len(CHUNK)):
        await line.send(CHUNK)


async def many_headers(line: Line) -> None:
    await line.send(FIRST)
    for _ in range(1000):
        await line.send(b"a: b\r\n" * 1000)
    await line.send(b"\r\n")


async def long_url(line: Line) -> None:
    await line.send(b"GET /")
    for _ in range(50 * 2**20 // len(CHUNK)):
        await line.send(CHUNK)


async def silent(line: Line) -> None:
    await line.read(10**6)


async def slow_header(line: Line) -> None:
    await line.send(FIRST + b"a: ")
    while await line.read(0.1) is None:
        await line.send(b"b")


async def slow_body(line: Line) -> None:
    await line.send(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n")
    while await line.read(0.1) is None:
        await line.send(b" ")


async def malformed(line: Line) -> None:
    await line.send(b"what is this\r\n\r\n")


async def pipelined(line: Line) -> None:
    await line.send(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100_000)


async def never_reading(line: Line) -> None:
    await line.send(b"GET /page/vendor/marked/marked.esm.js HTTP/1.1\r\nhost: localhost\r\n\r\n" * 16)
    await asyncio.sleep(10**6)


def request(key: str, method: str, path: str, length: int) -> bytes:
    """Return the head of a tenant's request."""
    return (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def large_body(item_id: str) -> list[bytes]:
    """Return the parts of a body with a large item that the model does not read."""
    item = f'{{"type": "reasoning", "id": "{item_id}", "summary": [], "content": [{{"type": "reasoning_text", "text": "'
    start = f'{{"model": "m", "max_output_tokens": 1, "input": [{item}'.encode()
    return [start, *[CHUNK] * (LARGE_BYTES // len(CHUNK)), b'"}]}, {"role": "user", "content": "go"}]}']


async def _post(line: Line, parts: list[bytes]) -> None:
    await line.send(request(TENANT, "POST", "/v1/responses", sum(map(len, parts))))
    for part in parts:
        await line.send(part)
    await line.read(60.0)


async def storing(line: Line) -> None:
    await _post(line, large_body("rs_2"))


async def referring(line: Line) -> None:
    references = ", ".join(['{"type": "item_reference", "id": "rs_1"}'] * 120)
    user = '{"role": "user", "content": "go"}'
    await _post(line, [f'{{"model": "m", "max_output_tokens": 1, "input": [{references}, {user}]}}'.encode()])


async def continuing(line: Line) -> None:
    body = f'{{"model": "m", "max_output_tokens": 1, "input": "go", "previous_response_id": "{line.target}"}}'
    await _post(line, [body.encode()])


async def listing(line: Line) -> None:
    await line.send(request(TENANT, "GET", f"/v1/responses/{line.target}/input_items?limit=100", 0))
    await line.read(60.0)
    if line.answer and b" 200 " in line.answer[:16]:
        await asyncio.sleep(10**6)


async def nothing(_: Line) -> None:
    await asyncio.sleep(10**6)


class Attack(Struct, frozen=True):
    """Kind of attack."""

    name: str
    send: Callable[[Line], Awaitable[None]]
    lines: int = 1
    """Concurrent connections per attacker."""
    seconds: float = 0.0
    """Minimum duration in seconds, to see the server's answer."""
    receive_buffer: int = 0
    """Receive buffer of the socket in bytes; 0 for the system default."""
    statuses: frozenset[int] = frozenset()
    """Expected HTTP statuses of the answers."""
    is_tenant: bool = False
    """True for attacks with an API key."""
    most: int = 10**6
    """Maximum number of attackers."""


ATTACKS = (
    Attack("nothing, for comparison", nothing),
    Attack("200 MB header", long_header, statuses=frozenset({431})),
    Attack("1,000,000 headers", many_headers, statuses=frozenset({431})),
    Attack("50 MB URL", long_url, statuses=frozenset({414})),
    Attack("malformed requests", malformed, statuses=frozenset({400})),
    Attack("50 silent connections each", silent, lines=50, seconds=12),
    Attack("a header byte each 0.1 s", slow_header, seconds=14, statuses=frozenset({408})),
    Attack("a body byte each 0.1 s", slow_body, seconds=36, statuses=frozenset({408})),
    Attack("endless pipelined requests", pipelined),
    Attack("16 answers never read", never_reading, receive_buffer=4096),
    Attack("tenant: nothing", nothing, is_tenant=True),
    Attack("tenant: 120 references", referring, statuses=frozenset({200, 429}), is_tenant=True),
    Attack("tenant: long conversation", continuing, statuses=frozenset({200, 429}), is_tenant=True),
    Attack("tenant: lists never read", listing, receive_buffer=4096, statuses=frozenset({429}), is_tenant=True),
    Attack("tenant: 31 MiB stored", storing, statuses=frozenset({200, 429}), is_tenant=True, most=16),
)


async def _attack(address: tuple[str, int], attack: Attack, target: str, outcomes: Counter[str]) -> None:
    """Repeat an attack on new connections until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        with socket.socket() as sock:
            sock.setblocking(False)
            if attack.receive_buffer:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, attack.receive_buffer)
            try:
                await loop.sock_connect(sock, address)
                line = Line(sock, target)
            except OSError:
                outcomes["not connected"] += 1
                await asyncio.sleep(0.1)
                continue
            with contextlib.suppress(OSError):
                await attack.send(line)
            outcomes[await _outcome(line)] += 1


async def _outcome(line: Line) -> str:
    """Return the status of the answer, or "closed" without one."""
    with contextlib.suppress(OSError):
        answer = await line.read(READ_SECONDS)
        if answer is not None and answer.startswith(b"HTTP/1.1 "):
            return answer.split(b" ", 2)[1].decode()
    return "closed"


async def _attack_all(
    address: tuple[str, int], attack: Attack, target: str, attackers: int, seconds: float
) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    lines = min(attackers, attack.most) * attack.lines
    tasks = [asyncio.create_task(_attack(address, attack, target, outcomes)) for _ in range(lines)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return outcomes


def run_attackers(
    address: tuple[str, int], name: str, target: str, attackers: int, seconds: float, result: Connection
) -> None:
    """Attack from this process, and send the count of each outcome.

    `target` is the id of a large stored response of the attacking tenant. The process has the lowest priority, since
    real attackers run on other machines.
    """
    os.nice(19)
    attack = next(attack for attack in ATTACKS if attack.name == name)
    result.send(dict(asyncio.run(_attack_all(address, attack, target, attackers, seconds))))
