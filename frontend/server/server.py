"""HTTP server: runs the app under uvicorn and drains it on a signal."""

import asyncio
import gc
import socket
from types import FrameType

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tandem.frontend.api.service import Service, build_service
from tandem.frontend.config import FrontendConfig
from tandem.frontend.errors import error_body
from tandem.frontend.listening import listen
from tandem.frontend.server.app import create_app
from tandem.frontend.server.middleware import REQUEST_ID, fresh_id


class JsonErrorProtocol(HttpToolsProtocol):
    """HTTP protocol that answers malformed HTTP with the OpenAI error body.

    Malformed HTTP never reaches the app.
    """

    def send_400_response(self, msg: str) -> None:
        body = error_body(400, msg, None, "invalid_http")
        lines = [b"%b: %b\r\n" % header for header in self.server_state.default_headers]
        lines += [b"%b: %b\r\n" % (REQUEST_ID, fresh_id()), b"content-type: application/json\r\n"]
        lines += [b"content-length: %d\r\n" % len(body)]
        self.transport.write(b"".join([STATUS_LINE[400], *lines, b"connection: close\r\n\r\n", body]))
        self.transport.close()


class DrainingServer(uvicorn.Server):
    """Server that drains on the first signal and exits at once on the second.

    While it drains it is not ready, and open streams get `drain_timeout` seconds to end.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        # Objects loaded so far live as long as the process; frozen, they are skipped by every later collection.
        gc.collect()
        gc.freeze()

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


def build_server(config: FrontendConfig) -> DrainingServer:
    """Build the server of one frontend.

    Raises TokenizerError if the model directory has no usable tokenizer.
    """
    service = build_service(config)
    settings = uvicorn.Config(
        create_app(service),
        host=config.host,
        port=config.port,
        http=JsonErrorProtocol,
        log_level=config.log_level,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        # Longer than proxies keep idle connections, so that this side never closes one while a request is on its way.
        timeout_keep_alive=75,
        ws="none",
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
    )
    return DrainingServer(settings, service)


def serve(config: FrontendConfig) -> None:
    """Serve until a signal, on the inherited socket if the configuration has one.

    The address is bound first, so that early clients wait instead of being refused. Raises OSError if the address is in
    use, TokenizerError if the model directory has no usable tokenizer.
    """
    with listen(config.host, config.port) if config.fd is None else socket.socket(fileno=config.fd) as sock:
        build_server(config).run(sockets=[sock])
