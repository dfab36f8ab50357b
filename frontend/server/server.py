"""HTTP server: runs the app under uvicorn and drains it on a signal."""

import asyncio
import gc
import logging
import socket
import ssl
from functools import partial
from types import FrameType

import uvicorn

from tandem.frontend.api.service import Service, build_service
from tandem.frontend.config import FrontendConfig
from tandem.frontend.listening import allowed_connections, listen, raise_file_limit, url_of
from tandem.frontend.server.app import create_app
from tandem.frontend.server.connections import Connection, Connections
from tandem.frontend.server.protocol import LimitedProtocol
from tandem.frontend.server.rate_limited_log import RateLimitedLog
from tandem.frontend.server.tls import TlsListener, server_context

logger = logging.getLogger(__name__)

_CHECKS_PER_TIMEOUT = 4
_CHECK_SECONDS = 1.0
"""Longest time between two checks of the deadlines of a connection."""

_READY_SECONDS = 0.1
"""Time between two looks at whether the engine answers."""


class DrainingServer(uvicorn.Server):
    """Server that drains on the first signal and exits at once on the second.

    While it drains it is not ready, and open streams get `drain_timeout` seconds to end.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        connections: Connections,
        tls: ssl.SSLContext | None,
        url: str | None = None,
    ) -> None:
        """Connect the parts; `url` is announced on stdout once the frontend is ready."""
        super().__init__(config)
        self.connections = connections
        self._service = service
        self._tls = tls
        self._url = url
        self._listeners: list[TlsListener] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks = [asyncio.create_task(self.connections.watch())]
        if self._url is not None:
            self._tasks.append(asyncio.create_task(self._announce(self._url)))
        await super().startup(sockets if self._tls is None else [])
        if self._tls is not None:
            timeout = self._service.config.connections.header_timeout
            for sock in sockets or ():
                self._listeners.append(TlsListener(sock, self._tls, timeout, self.connections, self._make_protocol))
                self._listeners[-1].start()
        # Objects loaded so far live as long as the process; frozen, they are skipped by every later collection.
        gc.collect()
        gc.freeze()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self._listeners:
            listener.close()
        await super().shutdown(sockets)
        for task in self._tasks:
            task.cancel()

    async def _announce(self, url: str) -> None:
        """Print the URL once the engine answers.

        Whoever waits for the frontend then knows when to begin.
        """
        while not self._service.health().ready:
            await asyncio.sleep(_READY_SECONDS)
        print(f"tandem frontend is ready on {url}", flush=True)

    def _make_protocol(self, successor_of: Connection) -> LimitedProtocol:
        return LimitedProtocol(
            self.config,
            self.server_state,
            self.lifespan.state,
            limits=self._service.config.connections,
            connections=self.connections,
            successor_of=successor_of,
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal by draining, or by exiting at once if it is the second.

        Unlike uvicorn, do not raise it again at the end: the exit code is 0.
        """
        if self._service.draining or self._loop is None:
            self.should_exit = True
            self.force_exit = True
        else:
            self._service.draining = True
            self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Drain the service in the background, then exit. Idempotent."""
        if self._drain is None:
            self._drain = asyncio.create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        try:
            await self._service.drain()
        finally:
            self.should_exit = True


def build_server(config: FrontendConfig, url: str | None = None) -> DrainingServer:
    """Build the server of one frontend, which announces its URL if it has one.

    Raises TokenizerError if the model directory has no usable tokenizer.
    """
    service = build_service(config)
    connections = _build_connections(config, service)
    settings = uvicorn.Config(
        create_app(service),
        host=config.host,
        port=config.port,
        # Not a class, but called like one.
        http=partial(LimitedProtocol, limits=config.connections, connections=connections),  # type: ignore[arg-type]
        log_level=None,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=config.connections.keep_alive_timeout,  # type: ignore[arg-type]
        ws="none",
    )
    tls = None
    if config.tls_cert is not None and config.tls_key is not None:
        tls = server_context(config.tls_cert, config.tls_key)
    return DrainingServer(settings, service, connections, tls, url)


def _build_connections(config: FrontendConfig, service: Service) -> Connections:
    """Build the table of connections.

    Its size follows from the flag and from the limit of open files.
    """
    limits, allowed = config.connections, allowed_connections()
    wanted = limits.max_connections or allowed
    if wanted > allowed or allowed < config.max_concurrent:
        logger.warning(
            "the limit of open files has room for %d connections, fewer than --limit-concurrency or --max-concurrent "
            "ask for; raise ulimit -n (LimitNOFILE of systemd)", allowed,
        )  # fmt: skip
    shortest = min(limits.header_timeout, limits.body_timeout, limits.keep_alive_timeout, limits.send_timeout)
    interval = min(_CHECK_SECONDS, shortest / _CHECKS_PER_TIMEOUT)
    connections = Connections(min(wanted, allowed), interval, service.metrics.connections, RateLimitedLog(logger))
    service.metrics.connections.open.set_function(lambda: len(connections))
    return connections


def serve(config: FrontendConfig) -> None:
    """Serve until a signal, on the inherited socket if the configuration has one.

    The address is bound first, so that early clients wait instead of being refused. Raises OSError if the address is in
    use, TokenizerError if the model directory has no usable tokenizer.
    """
    raise_file_limit()
    fds = config.listener_fds
    with socket.socket(fileno=fds[config.slot]) if fds else listen(config.host, config.port) as sock:
        # A supervisor announces its frontend itself.
        url = url_of(sock, "http" if config.tls_cert is None else "https") if not fds else None
        server = build_server(config, url)
        if url is not None:
            print(f"tandem frontend listens on {url}", flush=True)
        server.run(sockets=[sock])
