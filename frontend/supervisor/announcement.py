"""Announce on stdout when a service is ready and where it listens."""

import asyncio
import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from tandem.frontend.listening import UNIX_SCHEME
from tandem.frontend.supervisor.frontends.frontends import Frontends
from tandem.frontend.supervisor.supervised_engine import SupervisedEngine
from tandem.protocol.events import Phase
from tandem.protocol.logs import announce

_POLL_SECONDS = 0.05
_STRAGGLER_SECONDS = 10.0
"""Seconds to wait for the other frontends once one of them is ready."""


class Announcement:
    """Announce a service that has an engine, frontends or both."""

    def __init__(
        self,
        engine: SupervisedEngine | None,
        frontends: Frontends | None,
        http_urls: Sequence[str],
        ops_url: str,
        commit: str,
        endpoint: str | None = None,
        is_early: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Initialize the announcement.

        http_urls: URLs of the frontends, if any. commit: commit of a model from the hub, or empty. endpoint: engine of
        frontends that have no engine here. is_early: announce the ops port before the engine is ready, for users who
        cannot know it.
        """
        self._engine = engine
        self._frontends = frontends
        self._http_urls = http_urls
        self._ops_url = ops_url
        self._commit = f"commit {commit}, " if commit else ""
        self._endpoint = endpoint
        self._is_early = is_early
        self._clock = clock
        self._started = clock()

    @property
    def _addresses(self) -> str:
        return " and ".join(self._http_urls)

    async def run(self) -> None:
        """Print the addresses once requests are accepted."""
        if self._engine is not None:
            await self._announce_engine(self._engine)
        elif self._frontends is not None:
            await self._announce_frontends(self._frontends)

    async def _announce_engine(self, engine: SupervisedEngine) -> None:
        while (heartbeat := engine.watch.heartbeat) is None or heartbeat.phase in (Phase.STARTING, Phase.FAILED):
            await asyncio.sleep(_POLL_SECONDS)
        if self._is_early:
            announce(f"engine metrics on {self._ops_url}/metrics")
        while not engine.watch.health().ready:
            await asyncio.sleep(_POLL_SECONDS)
        uptime = f"{self._clock() - self._started:.1f} s"
        if self._frontends is None:
            announce(f"the engine is ready ({self._commit}{uptime})", {"endpoint": engine.endpoint, **self._metrics})
            return
        facts = await self._until_ready(self._frontends)
        count = len(self._frontends.slots)
        announce(
            f"tandem is ready on {self._addresses} (model {facts.get('model')}, {self._commit}{facts.get('device')}, "
            f"{facts.get('kv_tokens')} KV tokens, {f'{count} frontends, ' if count > 1 else ''}"
            f"{self._clock() - self._started:.1f} s)",
            self._pages,
            urls=list(self._http_urls),
            model=facts.get("model"),
            seconds=round(self._clock() - self._started, 3),
        )

    async def _announce_frontends(self, frontends: Frontends) -> None:
        announce(f"tandem frontend waits for the engine at {self._endpoint}")
        while not frontends.has_reported:
            await asyncio.sleep(_POLL_SECONDS)
        announce(f"tandem frontend listens on {self._addresses}")
        await self._until_ready(frontends)
        announce(f"tandem frontend is ready on {self._addresses}", self._pages, urls=list(self._http_urls))

    @property
    def _metrics(self) -> dict[str, str]:
        return {"metrics": f"{self._ops_url}/metrics"}

    @property
    def _pages(self) -> dict[str, str]:
        """Return the URLs of the playground, unless on a Unix socket, and of the metrics."""
        url = next((url for url in self._http_urls if not url.startswith(UNIX_SCHEME)), None)
        return ({} if url is None else {"playground": _browsable(url)}) | self._metrics

    async def _until_ready(self, frontends: Frontends) -> dict[str, Any]:
        """Wait until the frontends are ready.

        Return the model facts reported by one of them. Frontends that take much longer than the first are not waited
        for.
        """
        while not frontends.num_serving:
            await asyncio.sleep(_POLL_SECONDS)
        until = self._clock() + _STRAGGLER_SECONDS
        while frontends.num_serving < len(frontends.slots) and self._clock() < until:
            await asyncio.sleep(_POLL_SECONDS)
        while (facts := await asyncio.to_thread(_ask, self._http_urls[0], "/health/ready")) is None:
            await asyncio.sleep(2 * _POLL_SECONDS)
        return facts


class _UnixConnection(http.client.HTTPConnection):
    """HTTP connection to a Unix socket."""

    def __init__(self, host: str, path: str) -> None:
        super().__init__(host, timeout=2)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _reachable(host: str) -> str:
    """Return the address at which this host can reach a listening socket.

    The socket may listen on a wildcard address.
    """
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _browsable(url: str) -> str:
    """Return the URL of the playground for a browser on this host."""
    parts = urlsplit(url)
    host = _reachable(parts.hostname or "")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}/"


def _connection(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if url.startswith(UNIX_SCHEME):
        return _UnixConnection("localhost", unquote(parts.netloc))
    host = _reachable(parts.hostname or "")
    if parts.scheme == "https":
        # The server is a child of this process on a socket of this process, so its certificate need not be verified.
        context = ssl._create_unverified_context()
        return http.client.HTTPSConnection(host, parts.port, timeout=2, context=context)
    return http.client.HTTPConnection(host, parts.port, timeout=2)


def _ask(url: str, path: str) -> dict[str, Any] | None:
    """Return the JSON of a frontend's response to a GET.

    None unless the status is 200.
    """
    connection = _connection(url)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body: dict[str, Any] = json.loads(response.read())
        return body if response.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
