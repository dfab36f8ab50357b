"""Authentication of frontends by their CURVE keys (ZAP, ZeroMQ RFC 27)."""

import logging
import threading
import time
from typing import Any

import zmq
from zmq.utils import z85

from tandem.engine_core.wire.client_keys import ClientKeys
from tandem.protocol.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"
"""Endpoint at which libzmq sends authentication requests, within one context."""
RELOAD_SECONDS = 1.0
"""Interval at which the folder of keys is checked for changes, in seconds."""
POLL_SECONDS = 0.2
"""Longest wait for a question, in seconds."""
_ACCEPTED, _REFUSED = b"200", b"400"
_FRAMES = 7
"""Parts of a question about a CURVE key: version, id, domain, address, identity, mechanism, key."""


class Authenticator:
    """Thread that answers libzmq's authentication requests (ZAP).

    It binds before any socket of the engine does, and answers for all of them. Messages that arrive afterwards carry
    the key of their sender as `User-Id`. libzmq refuses everybody while no answer comes (`zap_enforce_domain`); if the
    authenticator dies, the engine has to exit, because no frontend could connect any more.
    """

    def __init__(self, context: Any, keys: ClientKeys) -> None:
        self.keys = keys
        self._context = context
        self._log = RateLimitedLog(logger)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Bind and answer from now on.

        Raises ValueError if the folder of keys cannot be used.
        """
        self.keys.load()
        handler = self._context.socket(zmq.REP)
        handler.linger = 0
        handler.bind(ENDPOINT)
        self._thread = threading.Thread(target=self._run, args=(handler,), name="authenticator", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Raise RuntimeError if the thread has died."""
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError("the authenticator of frontends has died; none could connect any more")

    def _run(self, handler: Any) -> None:
        reload_at = 0.0
        try:
            while not self._stop.is_set():
                if handler.poll(int(POLL_SECONDS * 1000)):
                    handler.send_multipart(self._answer(handler.recv_multipart()))
                if time.monotonic() >= reload_at:
                    self.keys.refresh()
                    reload_at = time.monotonic() + RELOAD_SECONDS
        except Exception:
            logger.exception("the authenticator failed")
        finally:
            handler.close()

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """Return the answer: version, id, status, its text, user id, metadata."""
        version, request_id = (*question, b"", b"")[:2]
        if len(question) != _FRAMES or question[5] != b"CURVE":
            return [version, request_id, _REFUSED, b"only CURVE keys are accepted", b"", b""]
        address, key = question[3].decode(errors="replace"), z85.encode(question[6])
        if key not in self.keys.names:
            self.keys.refresh()  # it may have been added a moment ago
        if key in self.keys.names:
            return [version, request_id, _ACCEPTED, b"", key, b""]
        self._log.warning(
            "key",
            "refused a frontend from %s: its key %s... is not in %s; `tandem keys %s --client NAME` makes one that is",
            address,
            key.decode()[:8],
            self.keys.folder,
            self.keys.folder.parent,
        )
        return [version, request_id, _REFUSED, b"unknown key", b"", b""]
