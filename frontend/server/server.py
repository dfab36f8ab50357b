"""HTTP server: runs the app under uvicorn and drains it on shutdown.

It drains on a signal, or on request of its supervisor.
"""

import asyncio
import gc
import logging
import socket
import ssl
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from types import FrameType

import uvicorn

from tandem.frontend.api.service import Service, build_service
from tandem.frontend.config import FrontendConfig, frontend_name
from tandem.frontend.control_channel import Beat
from tandem.frontend.listening import allowed_connections, inherited_socket, raise_file_limit
from tandem.frontend.metrics.processes import GarbageCollector
from tandem.frontend.metrics.reports import Report
from tandem.frontend.server.app import create_app
from tandem.frontend.server.connections import Connection, Connections
from tandem.frontend.server.listeners import Handshake, Listeners, server_context
from tandem.frontend.server.protocol import LimitedProtocol
from tandem.frontend.server.supervised import Supervised
from tandem.protocol.logs import AUDIT_LOGGER, LogLevel, set_log_level, with_fields
from tandem.protocol.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)
audit = logging.getLogger(AUDIT_LOGGER)

_CHECKS_PER_TIMEOUT = 4
_CHECK_SECONDS = 1.0
"""Maximum seconds between two checks of connection deadlines."""

GRACE_SECONDS = 1.0
"""Seconds that an idle connection has to start a last request at shutdown."""
SUCCESSOR_GRACE_SECONDS = 5.0
"""The same when another process has taken over. This one may then take its time, and the longer a connection has been
idle, the less likely a request is in flight when it is closed."""
_FLUSH_SECONDS = 1.0
"""Seconds for responses to write their error events after their streams were ended."""
REPEATED_SIGNAL_SECONDS = 0.5
"""Seconds after the first signal within which another one is ignored."""
_GC_THRESHOLDS = (10_000, 20, 20)
"""Thresholds of the garbage collector. Objects of a request are freed by reference counting, so that collections find
little."""


class DrainingServer(uvicorn.Server):
    """Server of one frontend, which drains before it exits.

    It drains at the first signal and ends open responses at the second. With a supervisor it first asks for a
    successor, and serves until it is asked to drain.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        connections: Connections,
        tls: ssl.SSLContext | None,
        supervisor: socket.socket | None = None,
    ) -> None:
        """Initialize the server.

        supervisor: the control channel, if any.
        """
        super().__init__(config)
        self.connections = connections
        self._service = service
        self._tls = tls
        self._supervised = (
            Supervised(supervisor, self, service.metrics.load.loop_lag.observe) if supervisor is not None else None
        )
        if self._supervised is not None:
            service.metric_totals = self._supervised.totals
        self._listeners: Listeners | None = None
        self._slot_sockets: Sequence[Sequence[socket.socket]] = ()
        self._slots: tuple[int, ...] = (service.config.slot,)
        """Slots to accept from once the process is serving."""
        self._num_opening = 0
        """Accepted connections that are not in the table yet."""
        self._is_serving = False
        self._is_leaving = False
        self._signaled_at: float | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._drain: asyncio.Task[None] | None = None
        self._exit: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def run_slots(self, slots: Sequence[Sequence[socket.socket]]) -> None:
        """Serve on the sockets of these slots; slots may share sockets."""
        self._slot_sockets = slots
        self.run([*{sock for slot in slots for sock in slot}])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the app, then accept from the sockets.

        Each socket is a slot, unless `run_slots` was called. With a supervisor, connections are accepted only once
        requests can be answered, as a sibling or predecessor serves meanwhile. Without one, early requests wait for the
        engine.
        """
        self._loop = asyncio.get_running_loop()
        self._tasks = [asyncio.create_task(self.connections.watch())]
        if self._supervised is not None:
            self._tasks.append(asyncio.create_task(self._supervised.run()))
        await super().startup(sockets=[])
        slots = self._slot_sockets or [[sock] for sock in sockets or ()]
        self._listeners = Listeners(slots, self._connect, self._room)
        # Objects loaded so far live as long as the process; freezing them excludes them from later collections.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        if self._supervised is None:
            self._begin_serving()
        else:
            self._tasks.append(asyncio.create_task(self._serve_after_link()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._listeners is not None:
            self._listeners.accept_from(())
            self._listeners.cancel()
        await super().shutdown(sockets)
        for task in self._tasks:
            task.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal.

        Unlike uvicorn, do not raise it again at the end: the exit code is 0.
        """
        if self._loop is None:
            self.exit()
        else:
            self._loop.call_soon_threadsafe(self._on_signal)

    # Called on messages of the supervisor.

    def beat(self) -> Beat:
        status = "draining" if self._service.draining else "serving" if self._is_serving else "starting"
        slots = self._listeners.slots if self._listeners is not None else ()
        engine = self._service.client.health()
        state = (engine.status, engine.reason)
        return Beat(status, slots, self._service.client.num_open, len(self.connections), engine=state)

    def metrics(self) -> Report:
        return self._service.metrics.registry.report()

    @property
    def model_name(self) -> str:
        return self._service.model_name

    def accept_from(self, slots: Iterable[int]) -> None:
        self._slots = tuple(slots)
        if self._is_serving and self._listeners is not None:
            self._listeners.accept_from(self._slots)

    def drain_unasked(self) -> None:
        config = self._service.config
        self.begin_drain(config.shutdown_delay, config.drain_timeout)

    def begin_drain(self, delay: float, timeout: float) -> None:
        """Start draining, after which the process exits. Idempotent.

        It becomes unready at once, accepts for `delay` more seconds, then finishes open requests. Requests still open
        after `timeout` seconds end with an error.
        """
        if self._drain is None:
            self._service.draining = True
            self._drain = asyncio.create_task(self._drain_and_exit(delay, timeout))

    def reload(self, log_level: LogLevel) -> None:
        """Reload keys and TLS files, and set the log level.

        New connections use the new certificate; open ones are kept. Files that are invalid are not applied.
        """
        set_log_level(log_level)
        self._service.keys.reload_soon()
        cert, key = self._service.config.tls_cert, self._service.config.tls_key
        if cert is None or key is None:
            return
        try:
            self._tls = server_context(cert, key)
        except (OSError, ValueError) as error:
            fields = with_fields(tls_cert=str(cert), tls_key=str(key), reason=str(error))
            audit.error("the certificate was not reloaded, that from before stays", extra=fields)
        else:
            audit.info("the certificate was reloaded", extra=with_fields(tls_cert=str(cert), tls_key=str(key)))

    def exit(self) -> None:
        """Exit without draining.

        Open requests end with an error first, unless this is called again. Called by the running event loop.
        """
        if self._loop is None or self._exit is not None:
            self.should_exit = self.force_exit = True
        else:
            self._exit = self._loop.create_task(self._end_and_exit())

    # Internals.

    def _on_signal(self) -> None:
        """Start shutdown at the first signal, exit at a later one.

        Programs such as coreutils' `timeout` send a signal twice, to the process and to its group.
        """
        assert self._loop is not None
        now, before = self._loop.time(), self._signaled_at
        if before is not None and now - before <= REPEATED_SIGNAL_SECONDS:
            return
        self._signaled_at = now
        if before is not None:
            self.exit()
            return
        if self._supervised is None:
            self.drain_unasked()
        elif not self._service.draining:
            self._is_leaving = True
            self._supervised.leave()

    async def _serve_after_link(self) -> None:
        await self._service.link_awaited.wait()
        self._begin_serving()

    def _begin_serving(self) -> None:
        assert self._listeners is not None
        if not self._service.draining:
            self._is_serving = True
            self._listeners.accept_from(self._slots)

    async def _drain_and_exit(self, delay: float, timeout: float) -> None:
        try:
            await asyncio.sleep(delay)
            self._is_serving = False
            if self._listeners is not None:
                await self._listeners.close()
            await self.connections.drain(SUCCESSOR_GRACE_SECONDS if self._is_leaving else GRACE_SECONDS, timeout)
            if cut := self._service.client.num_open:
                logger.warning(
                    "%d sequences in progress were cut after %.10g s; raise --drain-timeout to let such finish",
                    cut,
                    timeout,
                )
            await self._end_and_exit()
        finally:
            self.should_exit = True

    async def _end_and_exit(self) -> None:
        """End open requests with an error, and exit once that is written."""
        try:
            self._service.end_requests()
            await self.connections.wait_until_answered(_FLUSH_SECONDS)
        finally:
            self.should_exit = True

    def _connect(self, sock: socket.socket, peer: str) -> asyncio.Task[None]:
        """Start serving an accepted connection."""
        if self._tls is None or sock.family == socket.AF_UNIX:
            self._num_opening += 1
            return asyncio.create_task(self._open(sock))
        timeout = self._service.config.connections.header_timeout
        return Handshake(sock, peer).start(self._tls, timeout, self.connections, self._make_protocol)

    async def _open(self, sock: socket.socket) -> None:
        try:
            with suppress(OSError):  # the client has disconnected
                await asyncio.get_running_loop().connect_accepted_socket(self._make_protocol, sock)
        finally:
            self._num_opening -= 1

    def _room(self, wanted: int) -> int:
        """Return how many connections can be accepted now, at most `wanted`."""
        return max(self.connections.room(wanted + self._num_opening) - self._num_opening, 0)

    def _make_protocol(self, successor_of: Connection | None = None) -> LimitedProtocol:
        return LimitedProtocol(
            self.config,
            self.server_state,
            self.lifespan.state,
            limits=self._service.config.connections,
            connections=self.connections,
            successor_of=successor_of,
        )


def build_server(config: FrontendConfig) -> DrainingServer:
    """Build the server of one frontend.

    It uses the supervisor's control channel, if the settings have one. Raises TokenizerError if the model directory has
    no usable tokenizer.
    """
    service = build_service(config)
    connections = _build_connections(config, service)
    settings = uvicorn.Config(
        create_app(service),
        http=LimitedProtocol,
        log_level=None,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=config.connections.keep_alive_timeout,  # type: ignore[arg-type]
        ws="none",
    )
    tls = None
    if config.tls_cert is not None and config.tls_key is not None:
        tls = server_context(config.tls_cert, config.tls_key)
    supervisor = None if config.supervisor_fd is None else inherited_socket(config.supervisor_fd)
    return DrainingServer(settings, service, connections, tls, supervisor)


def _build_connections(config: FrontendConfig, service: Service) -> Connections:
    """Build the table of connections.

    Its size depends on the flag and on the limit of open files.
    """
    limits, allowed = config.connections, allowed_connections()
    wanted = limits.max_connections or allowed
    if wanted > allowed or allowed < config.max_concurrent:
        logger.warning(
            "the limit of open files has room for %d connections, fewer than --limit-concurrency or --max-concurrent "
            "ask for; raise ulimit -n (LimitNOFILE of systemd)",
            allowed,
        )
    shortest = min(limits.header_timeout, limits.body_timeout, limits.keep_alive_timeout, limits.send_timeout)
    interval = min(_CHECK_SECONDS, shortest / _CHECKS_PER_TIMEOUT)
    log = RateLimitedLog(logger, at_interval_end=True)
    connections = Connections(min(wanted, allowed), interval, service.metrics.connections, log)
    service.metrics.registry.register(GarbageCollector(frontend_name(config.slot)))
    service.metrics.connections.open.set_function(lambda: len(connections))
    return connections


def serve(config: FrontendConfig) -> None:
    """Serve on the inherited sockets until a signal.

    Raises TokenizerError if the model directory has no usable tokenizer.
    """
    raise_file_limit()
    # One object per descriptor: a second one would close it on deletion.
    sockets = {fd: inherited_socket(fd) for fd in {fd for slot in config.listener_fds for fd in slot}}
    with ExitStack() as stack:
        for sock in sockets.values():
            stack.enter_context(sock)
        server = build_server(config)
        server.run_slots([[sockets[fd] for fd in slot] for slot in config.listener_fds])
