"""ZMQ sockets between the processes.

The engine has a ROUTER, each frontend a DEALER; heartbeats use PUB and SUB. `ipc://` endpoints live in a directory of
mode 0700, so only their owner can reach them. `tcp://` endpoints are encrypted and authenticate both sides with CURVE;
plain tcp must be requested explicitly.
"""

import logging
import os
import socket
import stat
from pathlib import Path
from typing import Any

import zmq
from msgspec import Struct

from tandem.protocol.curve import Curve

logger = logging.getLogger(__name__)

MAX_PORT = 65535

SEND_HIGH_WATER_MARK = 64
"""Messages queued for one frontend before a send fails with EAGAIN and the engine merges step outputs."""

RECEIVE_HIGH_WATER_MARK = 256
"""Commands of one frontend that the engine queues while its loop does not take them; later ones stay with their sender,
which bounds its requests itself."""
OUTPUT_HIGH_WATER_MARK = 128
"""Messages of the engine that a frontend queues while its loop does not take them; later output stays with the engine,
which merges it and judges how long it has not been read."""
MAX_COMMAND_BYTES = 64 * 2**20
"""Largest command that the engine accepts; libzmq closes the connection of a peer that sends a larger one, so a
frontend refuses such a request itself. A prompt has four bytes for each position, a grammar at most 2^20 characters."""
ENCRYPTION_BYTES = 64
"""Bytes by which CURVE makes a message longer, at most."""
MAX_OUTPUT_BYTES = 2**30
"""Largest message that a frontend accepts. One step's output is below 2 MiB; output of many steps can be merged into
one message while the frontend does not read."""

PING_INTERVAL_MS, PING_TIMEOUT_MS = 1000, 4000
"""Interval of ZMTP's own heartbeats, and time without an answer after which libzmq closes a connection.
`heartbeat_ttl` stays off: a process that was stopped and continued would consider its peers timed out, and close
connections with messages waiting in its sockets."""
UNACKNOWLEDGED_MS = 5000
"""TCP_USER_TIMEOUT: time without an acknowledgement after which the kernel closes a tcp connection."""
CONNECTION_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""Events of a connection to an engine that its frontend watches."""
ZAP_DOMAIN = b"tandem"
"""Domain of the engine's sockets in questions to the authenticator."""
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES = 10, 5, 3
"""TCP keepalive, which also covers a connection before its handshake."""


_EXAMPLE = "ipc:///run/tandem/engine"


class Transport(Struct, frozen=True):
    """Security of the sockets of one deployment."""

    curve: Curve | None = None
    insecure_tcp: bool = False

    def check(self, endpoint: str) -> None:
        """Raise ValueError for an endpoint that these settings do not allow."""
        if endpoint.startswith("ipc://"):
            return
        if not endpoint.startswith("tcp://"):
            raise ValueError(
                f"endpoint {endpoint!r} is neither ipc:// nor tcp://; give one such as {_EXAMPLE}, or "
                "tcp://10.0.0.1:5555 for other machines"
            )
        if self.curve is None and not self.insecure_tcp:
            raise ValueError(
                f"endpoint {endpoint!r} would carry prompts unencrypted: give --curve-keys DIR "
                "(made with `tandem keys DIR`), or --insecure-tcp on a network you trust"
            )

    def warn(self, endpoint: str) -> None:
        """Log that an endpoint is not secure, if so.

        Each process does that once, where it starts to use the endpoint.
        """
        if endpoint.startswith("tcp://") and self.curve is None:
            logger.warning("%s is neither encrypted nor authenticated (--insecure-tcp)", endpoint)


def prepare_endpoint(endpoint: str) -> None:
    """Prepare an `ipc://` endpoint for binding.

    Its directory is then private and has no socket of a dead process at this path. Raises ValueError if another process
    listens there, or if the directory is accessible to other users.
    """
    if not endpoint.startswith("ipc://"):
        return
    path = _absolute_path(endpoint)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"directory {path.parent} of endpoint {endpoint} cannot be created: {error}") from error
    check_ipc_path(endpoint)
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise ValueError(f"{path} of endpoint {endpoint} cannot be probed: {error}") from error
    raise ValueError(f"another process already listens on {endpoint}")


def check_ipc_path(endpoint: str) -> None:
    """Check the path of an `ipc://` endpoint without changing it.

    Raises ValueError if its directory is accessible to other users, or if another kind of file is there. The directory
    may be missing.
    """
    if not endpoint.startswith("ipc://"):
        return
    path = _absolute_path(endpoint)
    try:
        info, mode = path.parent.stat(), path.stat().st_mode if path.exists() else stat.S_IFSOCK
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(f"endpoint {endpoint} cannot be reached: {error.strerror}; choose another") from None
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise ValueError(
            f"directory {path.parent} of endpoint {endpoint} must belong to user {os.getuid()} with mode 0700, not to "
            f"user {info.st_uid} with mode {stat.S_IMODE(info.st_mode):04o}; name a socket in a directory of its own, "
            f"which need not exist, such as ipc://{path.parent / 'tandem' / path.name}"
        )
    if not stat.S_ISSOCK(mode):
        raise ValueError(f"{path} exists and is not a socket; choose another endpoint")


def _absolute_path(endpoint: str) -> Path:
    path = Path(endpoint.removeprefix("ipc://"))
    if not path.is_absolute():
        raise ValueError(
            f"endpoint {endpoint} is not an absolute path; name one in a directory of mode 0700, such as {_EXAMPLE}"
        )
    return path


def check_server_keys(transport: Transport) -> None:
    """Raise ValueError for the keys of a frontend, which cannot bind."""
    if transport.curve is not None and transport.curve.secret is None:
        raise ValueError("binding with CURVE needs engine.key_secret, but there is only engine.key")


def _secure_server(sock: Any, transport: Transport) -> None:
    check_server_keys(transport)
    if transport.curve is not None:
        sock.curve_server = True
        sock.curve_publickey = transport.curve.public
        sock.curve_secretkey = transport.curve.secret
        if transport.curve.clients is not None:
            # Without this libzmq lets every peer in while no authenticator answers.
            sock.zap_domain = ZAP_DOMAIN
            sock.zap_enforce_domain = True


def _secure_client(sock: Any, curve: Curve) -> None:
    pair = curve.client_pair()
    sock.curve_publickey, sock.curve_secretkey = pair.public, pair.secret
    sock.curve_serverkey = curve.public


def _notice_loss(sock: Any) -> None:
    """Make TCP notice that a peer's host or the network is gone."""
    sock.linger = 0
    sock.tcp_maxrt = UNACKNOWLEDGED_MS
    sock.tcp_keepalive = 1
    sock.tcp_keepalive_idle = KEEPALIVE_IDLE_SECONDS
    sock.tcp_keepalive_intvl = KEEPALIVE_INTERVAL_SECONDS
    sock.tcp_keepalive_cnt = KEEPALIVE_PROBES


def _ping(sock: Any) -> None:
    """Have libzmq ask the peers of a socket for signs of life.

    Only of a socket that never stops reading. While the queue of another one is full and its peer goes, the next ping
    ends this process with libzmq's `Assertion failed: !_io_error`.
    """
    sock.heartbeat_ivl = PING_INTERVAL_MS
    sock.heartbeat_timeout = PING_TIMEOUT_MS


def _bind(sock: Any, endpoint: str, transport: Transport) -> None:
    _notice_loss(sock)
    try:
        transport.check(endpoint)
        prepare_endpoint(endpoint)
        if endpoint.startswith("tcp://"):
            _secure_server(sock, transport)
        sock.bind(endpoint)
    except Exception:
        sock.close()
        raise


def _connect(sock: Any, endpoint: str, transport: Transport) -> None:
    _notice_loss(sock)
    try:
        transport.check(endpoint)
        if endpoint.startswith("tcp://") and transport.curve is not None:
            _secure_client(sock, transport.curve)
            # Before it connects: an engine refuses a key within a millisecond. `get_monitor_socket` returns it again.
            sock.get_monitor_socket(CONNECTION_EVENTS)
        sock.connect(endpoint)
    except Exception:
        sock.close()
        raise


def bind_router(context: Any, endpoint: str, transport: Transport = Transport()) -> Any:
    """Bind the engine's socket for commands and step outputs.

    With `ROUTER_MANDATORY`, a send to a frontend that is gone fails with EHOSTUNREACH instead of being dropped, and one
    to a frontend that does not read fails with EAGAIN.
    """
    router = context.socket(zmq.ROUTER)
    router.router_mandatory = True
    router.sndhwm = SEND_HIGH_WATER_MARK
    router.rcvhwm = RECEIVE_HIGH_WATER_MARK
    router.maxmsgsize = MAX_COMMAND_BYTES + ENCRYPTION_BYTES
    _bind(router, endpoint, transport)
    transport.warn(endpoint)
    return router


def connect_dealer(context: Any, endpoint: str, transport: Transport = Transport()) -> Any:
    """Connect a frontend's socket, with a random identity.

    A second peer with the same identity would be silently ignored. The queue of commands has no limit, so a send never
    fails while the engine takes no more.
    """
    dealer = context.socket(zmq.DEALER)
    dealer.identity = b"f" + os.urandom(15)
    dealer.sndhwm = 0
    dealer.rcvhwm = OUTPUT_HIGH_WATER_MARK
    dealer.maxmsgsize = MAX_OUTPUT_BYTES
    _connect(dealer, endpoint, transport)
    return dealer


def bind_heartbeat(context: Any, endpoint: str, transport: Transport = Transport()) -> Any:
    """Bind the engine's PUB socket.

    A listener that lags loses old heartbeats, never the newest for long.
    """
    publisher = context.socket(zmq.PUB)
    publisher.sndhwm = 8
    _ping(publisher)
    _bind(publisher, endpoint, transport)
    return publisher


def connect_heartbeat(context: Any, endpoint: str, transport: Transport = Transport()) -> Any:
    """Connect a SUB socket to the heartbeats of an engine.

    Its queue has no limit, since it is pinged: a process that does not read gets four small messages a second.
    """
    subscriber = context.socket(zmq.SUB)
    subscriber.rcvhwm = 0
    _ping(subscriber)
    subscriber.subscribe(b"")
    _connect(subscriber, endpoint, transport)
    return subscriber


def check_port(endpoint: str) -> None:
    """Raise ValueError for a tcp endpoint without a port that has a next one."""
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp://") and not (port.isdecimal() and 0 < int(port) < MAX_PORT):
        raise ValueError(
            f"endpoint {endpoint!r} has no port from 1 to {MAX_PORT - 1}; give one such as tcp://10.0.0.1:5555, whose "
            "heartbeats then have 5556"
        )


def heartbeat_endpoint(endpoint: str) -> str:
    """Return the endpoint of an engine's heartbeats.

    It is the ipc socket's path with `.beat`, or the next port of a tcp endpoint, which `check_port` has accepted.
    """
    if endpoint.startswith("ipc://"):
        return endpoint + ".beat"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + 1}"
