"""The engine's ROUTER socket.

libzmq's threads do the I/O, so the loop needs neither thread nor lock for it.
"""

import errno
import logging
from collections.abc import Iterator
from typing import Any

import zmq

from tandem.engine_core.contracts import TokenDelta
from tandem.engine_core.wire.wakeup import LoopWaker
from tandem.protocol.codec import decode_command, encode, step_output
from tandem.protocol.commands import AnyCommand
from tandem.protocol.errors import ProtocolError
from tandem.protocol.events import AnyEvent, Failure, Finished, Started, TokenLogprobs


class Outbox:
    """Output for one frontend, in columns, until it can be sent.

    The steps of a frontend that does not read are merged into one later message: each further token of a request is one
    more entry in the columns, so the size is bounded by the lengths of the requests. Nothing is ever dropped. A message
    that could not be sent is kept encoded, and later ones wait behind it, so that a retry costs only the send.
    """

    __slots__ = ("failures", "finished", "logprobs", "request_ids", "started", "tokens", "unsent")

    def __init__(self) -> None:
        self.request_ids: list[int] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finished: list[Finished] = []
        self.failures: list[Failure] = []
        self.started: list[Started] = []
        self.unsent: bytes | None = None
        """Encoded message that could not be sent."""

    @property
    def has_new(self) -> bool:
        """True if there is output besides the unsent message."""
        return bool(self.request_ids or self.finished or self.failures or self.logprobs or self.started)

    def encode(self, step_id: int) -> bytes:
        """Encode the columns as one message and empty them."""
        output = step_output(step_id, self.request_ids, self.tokens)
        output.finished.extend(self.finished)
        output.failures.extend(self.failures)
        output.logprobs.extend(self.logprobs)
        output.started.extend(self.started)
        columns = (self.request_ids, self.tokens, self.finished, self.failures, self.logprobs, self.started)
        for column in columns:
            column.clear()
        return encode(output)


logger = logging.getLogger(__name__)

MAX_DRAINED_MESSAGES = 256
"""Messages taken in one tick even if nothing runs, so that a flood of them cannot keep the first step from coming."""


class ZmqMailbox:
    """Implementation of `contracts.Mailbox` over one ROUTER socket."""

    def __init__(self, router: Any, wakeup: LoopWaker) -> None:
        self.router = router
        self.wakeup = wakeup
        self._poller = zmq.Poller()
        self._poller.register(router, zmq.POLLIN)
        self._poller.register(wakeup.reader, zmq.POLLIN)
        self._outboxes: dict[bytes, Outbox] = {}
        self._kept = False

    @property
    def has_backlog(self) -> bool:
        return self._kept

    def drain(self) -> Iterator[tuple[bytes, AnyCommand]]:
        for _ in range(MAX_DRAINED_MESSAGES):
            if not self.router.events & zmq.POLLIN:
                return
            frames = self.router.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 2:
                logger.warning("ignored a message of %d frames", len(frames))
                continue
            try:
                command = decode_command(frames[1])
            except ProtocolError as error:
                logger.warning("ignored from %s: %s", frames[0].hex(), error)
                continue
            yield frames[0], command

    def wait(self, seconds: float) -> None:
        self._poller.poll(int(seconds * 1000))
        self.wakeup.clear()

    def wake(self) -> None:
        self.wakeup.wake()

    def reply(self, client: bytes, event: AnyEvent) -> None:
        try:
            sent = self._send(client, encode(event))
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            sent = False
        if not sent:
            logger.warning("frontend %s does not read; dropped a %s", client.hex(), type(event).__name__)

    def add_tokens(self, client: bytes, delta: TokenDelta) -> None:
        box = self._outboxes.setdefault(client, Outbox())
        box.request_ids += delta.request_ids
        box.tokens += delta.tokens
        if delta.logprobs:
            box.logprobs += delta.logprobs

    def add_start(self, client: bytes, started: Started) -> None:
        self._outboxes.setdefault(client, Outbox()).started.append(started)

    def add_outcome(self, client: bytes, outcome: Finished | Failure) -> None:
        box = self._outboxes.setdefault(client, Outbox())
        if isinstance(outcome, Finished):
            box.finished.append(outcome)
        else:
            box.failures.append(outcome)

    def flush(self, step_id: int) -> list[bytes]:
        gone: list[bytes] = []
        for client, box in list(self._outboxes.items()):
            try:
                self._empty(client, box, step_id)
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                gone.append(client)
                del self._outboxes[client]
                continue
            if box.unsent is None:
                del self._outboxes[client]
        self._kept = bool(self._outboxes)
        return gone

    def _empty(self, client: bytes, box: Outbox, step_id: int) -> None:
        """Send the unsent message, then the columns.

        Raises ZMQError with EHOSTUNREACH if the frontend is gone.
        """
        if box.unsent is not None and self._send(client, box.unsent):
            box.unsent = None
        if box.unsent is None and box.has_new:
            data = box.encode(step_id)
            if not self._send(client, data):
                box.unsent = data

    def _send(self, client: bytes, data: bytes) -> bool:
        """Send one message; return False if the frontend's queue is full.

        Raises ZMQError with EHOSTUNREACH if the frontend is gone.
        """
        try:
            self.router.send_multipart((client, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
