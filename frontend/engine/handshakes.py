"""Log failed handshakes with an engine, and retry where libzmq gives up."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from tandem.protocol.rate_limited_log import RateLimitedLog
from tandem.protocol.sockets import CONNECTION_EVENTS

logger = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
"""Seconds before a retry of a connection with a refused key."""
REFUSED_KEY = (
    "the engine refuses this frontend's key; is there a client.key_secret in --curve-keys, and its public key in the "
    "folder `clients` of the engine's keys (`tandem keys DIR --client NAME`)?"
)
WRONG_KEY = "is its engine.key the one in --curve-keys?"
NO_KEY = "it may have keys; then give --curve-keys here"


async def watch_handshakes(subscriber: zmq.asyncio.Socket, on_failure: Callable[[str], None] = lambda _: None) -> None:
    """Log failed handshakes of a connected socket until cancelled.

    on_failure: called with the reason of each.

    An engine that ends may close a connection before its handshake, which is not reported as a failure. An engine with
    other keys closes each of them.

    libzmq gives up after an engine has refused a key; the connection is retried here, since the key may be added later.
    """
    log = RateLimitedLog(logger)
    monitor = subscriber.get_monitor_socket(CONNECTION_EVENTS)
    num_closed = 0
    try:
        while True:
            message = await recv_monitor_message(monitor)
            endpoint = message["endpoint"].decode()
            if message["event"] == zmq.EVENT_DISCONNECTED:
                continue
            if message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                num_closed = 0
                continue
            if message["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and not num_closed:
                num_closed += 1
                logger.info("the engine on %s closed a connection before its handshake, as one that ends", endpoint)
                continue
            if message["event"] != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                hint = WRONG_KEY if subscriber.get(zmq.MECHANISM) == zmq.CURVE else NO_KEY
                log.warning("handshake", "the handshake with an engine on %s failed; %s", endpoint, hint)
                on_failure(f"the handshake with it failed; {hint}")
                continue
            log.warning("key", "%s: %s", endpoint, REFUSED_KEY)
            on_failure(REFUSED_KEY)
            await asyncio.sleep(RETRY_SECONDS)
            with contextlib.suppress(zmq.ZMQError):  # libzmq may have dropped the endpoint
                subscriber.disconnect(endpoint)
            subscriber.connect(endpoint)
    finally:
        with contextlib.suppress(zmq.ZMQError):
            subscriber.disable_monitor()
        monitor.close(linger=0)
