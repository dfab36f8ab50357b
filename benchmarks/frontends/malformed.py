"""Send malformed messages to an engine from a separate process."""

import multiprocessing
from itertools import islice
from multiprocessing.process import BaseProcess

import zmq

from tandem.protocol.codec import decode_event, encode
from tandem.protocol.commands import EndSession, Hello
from tandem.protocol.events import Answer, Heartbeat
from tandem.protocol.sockets import connect_dealer, connect_heartbeat, heartbeat_endpoint
from tandem.protocol.version import PROTOCOL_VERSION
from tests.support.malformed_messages import MalformedMessages

NUM_MESSAGES = 100_000
BATCH = 50
"""Messages per connection. Each connection ends with a call; its answer shows that all messages were read."""
VOCAB = 4000
LAST_CALL = 77


class MalformedSender:
    """Sender process, which exits once the engine has read everything."""

    def __init__(self, endpoint: str) -> None:
        self._process: BaseProcess = multiprocessing.get_context("spawn").Process(
            target=send_all, args=(endpoint, NUM_MESSAGES), daemon=True
        )

    def __enter__(self) -> "MalformedSender":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.pid is not None:
            self._process.kill()
            self._process.join()

    def start(self) -> None:
        """Start sending."""
        self._process.start()

    def has_ended(self) -> bool:
        """Return whether the process has exited."""
        return not self._process.is_alive()

    @property
    def exit_code(self) -> int:
        """Exit code; 0 if the engine read everything."""
        return self._process.exitcode or 0


def send_all(endpoint: str, count: int) -> None:
    """Send `count` malformed messages, one connection after another."""
    with zmq.Context() as context:
        subscriber = connect_heartbeat(context, heartbeat_endpoint(endpoint))
        heartbeat = decode_event(subscriber.recv())
        assert isinstance(heartbeat, Heartbeat)
        subscriber.close(linger=0)
        hello = encode(Hello(PROTOCOL_VERSION, heartbeat.engine_epoch, "hostile"))
        source = iter(MalformedMessages(1, heartbeat.engine_epoch, VOCAB))
        for _ in range(count // BATCH):
            peer = connect_dealer(context, endpoint)
            peer.send(hello)
            for frames in islice(source, BATCH):
                peer.send_multipart(frames)
            peer.send(hello)
            peer.send(encode(EndSession(LAST_CALL, "none")))
            while not isinstance(answer := decode_event(peer.recv()), Answer) or answer.call != LAST_CALL:
                pass
            peer.close(linger=0)
