"""The engine's ROUTER socket.

libzmq's threads do the I/O, so the loop needs neither thread nor lock for it.
"""

import errno
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import zmq

from tandem.engine_core.contracts import TokenDelta
from tandem.engine_core.wire.authenticator import Authenticator
from tandem.engine_core.wire.disconnects import Disconnects
from tandem.engine_core.wire.io_threads import await_idle_threads
from tandem.engine_core.wire.launch_record import LaunchRecord
from tandem.engine_core.wire.leases import Leases
from tandem.engine_core.wire.outbox import Outbox
from tandem.engine_core.wire.wakeup import LoopWaker
from tandem.protocol.codec import decode_command, encode, step_output
from tandem.protocol.commands import LEASE_SECONDS, AnyCommand, Hello
from tandem.protocol.errors import ProtocolError
from tandem.protocol.events import AnyEvent, Closed, Failure, Finished, Launched, SequenceTimes, Started
from tandem.protocol.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

MAX_DRAINED_MESSAGES = 256
"""Messages taken in one tick even if nothing runs, so that a flood of them cannot keep the first step from coming."""

FIRST_FRAME = zmq.NOBLOCK | zmq.SNDMORE
"""Flags of the first frame of a message."""
SENT_SECONDS = 1.0
"""Longest wait, in seconds, for libzmq's threads to send."""
CLOSED_SECONDS = 10.0
"""Time for which output for a frontend that is gone is dropped: by then the last of its requests has ended."""


class ZmqMailbox:
    """Implementation of `contracts.Mailbox` over one ROUTER socket.

    A frontend is gone when it has disconnected, when its lease has expired, when its outbox is overrun, or when its key
    was removed. One that has disconnected counts as gone once all that it sent was read, a `Goodbye` perhaps: sends to
    it fail before that.
    """

    def __init__(
        self,
        router: Any,
        wakeup: LoopWaker,
        clock: Callable[[], float] = time.monotonic,
        authenticator: Authenticator | None = None,
        launches: LaunchRecord | None = None,
        disconnects: Disconnects | None = None,
        announce: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over the bound socket.

        authenticator: its keys decide which messages are accepted; None accepts the messages of every peer. launches:
        record of the requests that this engine and earlier engines have started; None for none. disconnects: watch of
        the socket's connections; with None a frontend is gone when a send to it fails, or its lease expires. announce:
        sends a heartbeat at once.
        """
        self.router = router
        self.wakeup = wakeup
        self._poller = zmq.Poller()
        self._poller.register(router, zmq.POLLIN)
        self._poller.register(wakeup.reader, zmq.POLLIN)
        self._disconnects = disconnects
        self._outboxes: dict[bytes, Outbox] = {}
        self._authenticator = authenticator
        self._names = authenticator.keys.names if authenticator is not None else {}
        self._keys: dict[bytes, bytes] = {}
        """Key of each frontend that has one and a lease."""
        self._leases = Leases(clock)
        self._log = RateLimitedLog(logger, clock)
        self._launches = launches
        self._announce = announce
        self._kept = False
        self._disconnected: list[bytes] = []
        """Frontends that sends do not reach, and from which messages may wait."""
        self._gone: dict[bytes, str] = {}
        """Frontends that the next flush reports, each with the reason."""
        self._closed: dict[bytes, float] = {}
        """Time since which output for a frontend that is gone is dropped, oldest first."""

    @property
    def has_backlog(self) -> bool:
        return self._kept or bool(self._disconnected) or bool(self._gone)

    def drain(self) -> Iterator[tuple[bytes, AnyCommand]]:
        self._leases.advance()
        if self._authenticator is not None:
            self._authenticator.check()
            self._apply_keys(self._authenticator.keys.names)
        for _ in range(MAX_DRAINED_MESSAGES):
            # `router.events` is the same, at nearly twice the cost.
            if not self.router.get(zmq.EVENTS) & zmq.POLLIN:
                self._judge()
                return
            frames = self._receive()
            if frames is None:
                continue
            self._leases.renew(frames[0])
            if len(frames) != 2:
                self._log.warning("frames", "ignored a message of %d frames from %s", len(frames), frames[0].hex())
                continue
            try:
                command = decode_command(frames[1])
            except ProtocolError as error:
                self._log.warning("undecodable", "ignored from %s: %s", frames[0].hex(), error)
                continue
            if isinstance(command, Hello):
                self._closed.pop(frames[0], None)
                self._tell_launched(frames[0], command.lost_identity)
            yield frames[0], command

    def _tell_launched(self, client: bytes, lost_identity: bytes) -> None:
        """Send a frontend the requests that the previous engine had launched for it."""
        if self._launches is not None and lost_identity and (ids := self._launches.launched(lost_identity)):
            self.reply(client, Launched(ids))

    def _receive(self) -> list[bytes] | None:
        """Return the next message; None if its sender's key was removed."""
        if self._authenticator is None:
            frames: list[bytes] = self.router.recv_multipart(zmq.NOBLOCK)
            return frames
        parts = self.router.recv_multipart(zmq.NOBLOCK, copy=False)
        key = parts[-1].get("User-Id").encode()
        if key not in self._names:
            self._log.warning("key", "ignored a message of a frontend whose key %s... was removed", key.decode()[:8])
            return None
        frames = [part.bytes for part in parts]
        self._keys[frames[0]] = key
        return frames

    def _apply_keys(self, names: dict[bytes, str]) -> None:
        """Close the connections of frontends with removed keys."""
        if names is self._names:
            return
        before, self._names = self._names, names
        for client, key in list(self._keys.items()):
            if key not in names:
                self._end(client, f"its key ({before[key]}) was removed")

    def _judge(self) -> None:
        """End the connections of silent frontends, and of those that have disconnected.

        Called when nothing waits in the queue.
        """
        for client in self._disconnected:
            self._drop(client)
            self._gone[client] = "it has disconnected"
        self._disconnected.clear()
        if self._disconnects is not None:
            self._probe(self._disconnects.take_due(self._leases.now, self._leases.clients))
        for client in self._leases.take_expired():
            self._end(client, f"it sent nothing for {LEASE_SECONDS:.0f} s")
        for client, since in list(self._closed.items()):
            if self._leases.now - since < CLOSED_SECONDS:
                break
            del self._closed[client]

    def _probe(self, clients: Iterable[bytes]) -> None:
        """Drop each of these frontends to which an output of no tokens cannot be sent."""
        nothing = encode(step_output(0, (), ()))
        for client in clients:
            try:
                self._send(client, nothing)
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                self._lose(client)

    def wait(self, seconds: float) -> None:
        self._poller.poll(int(seconds * 1000))
        self.wakeup.clear()

    def wake(self) -> None:
        self.wakeup.wake()

    def reply(self, client: bytes, event: AnyEvent) -> None:
        if not self._try_send(client, encode(event)):
            kind = type(event).__name__
            self._log.warning("dropped", "frontend %s does not read; dropped a %s", client.hex(), kind)

    def announce(self) -> None:
        self._announce()

    def add_tokens(self, client: bytes, delta: TokenDelta) -> None:
        box = self._outbox(client)
        box.request_ids += delta.request_ids
        box.tokens += delta.tokens
        if delta.logprobs:
            box.add_logprobs(delta.logprobs)
        if delta.logits:
            box.add_logits(delta.logits)
        if delta.drafted:
            box.drafted += delta.drafted
            box.drafts += delta.drafts

    def add_start(self, client: bytes, started: Started) -> None:
        if self._launches is not None:
            self._launches.note(client, started.request_id)
        self._outbox(client).started.append(started)

    def add_times(self, client: bytes, times: SequenceTimes) -> None:
        self._outbox(client).times.append(times)

    def add_outcome(self, client: bytes, outcome: Finished | Failure) -> None:
        box = self._outbox(client)
        if isinstance(outcome, Finished):
            box.finished.append(outcome)
        else:
            box.failures.append(outcome)

    def _outbox(self, client: bytes) -> Outbox:
        """Return the outbox of a frontend; one that is gone gets one that is never sent."""
        if client in self._closed:
            return Outbox()
        return self._outboxes.setdefault(client, Outbox())

    def flush(self, step_id: int) -> dict[bytes, str]:
        for client, box in list(self._outboxes.items()):
            try:
                self._empty(client, box, step_id)
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                self._lose(client)
                continue
            if box.unsent is None:
                del self._outboxes[client]
            elif reason := box.overrun(self._leases.now):
                self._end(client, reason)
        self._kept = bool(self._outboxes)
        gone, self._gone = self._gone, {}
        return gone

    def await_sent(self) -> None:
        await_idle_threads(SENT_SECONDS)

    def _end(self, client: bytes, reason: str) -> None:
        """Mark a frontend as gone, and send it `Closed` if it reads."""
        self._drop(client)
        self._gone[client] = reason
        self._try_send(client, encode(Closed(f"the engine cut off this frontend: {reason}")))

    def _lose(self, client: bytes) -> None:
        """Count a frontend as gone when nothing waits in the queue."""
        self._drop(client)
        self._disconnected.append(client)

    def _drop(self, client: bytes) -> None:
        """Forget a frontend and drop its output."""
        self._leases.forget(client)
        if self._disconnects is not None:
            self._disconnects.forget(client)
        self._keys.pop(client, None)
        self._outboxes.pop(client, None)
        self._closed.pop(client, None)
        self._closed[client] = self._leases.now

    def _empty(self, client: bytes, box: Outbox, step_id: int) -> None:
        """Send the unsent message, then the columns.

        Raises ZMQError with EHOSTUNREACH if the frontend is gone.
        """
        now = self._leases.now
        if box.unsent is not None:
            sent = self._send(client, box.unsent)
            box.record_send(sent, now)
            if not sent:
                return
            box.unsent = None
        if box.has_new:
            data = box.encode(step_id)
            sent = self._send(client, data)
            box.record_send(sent, now)
            if not sent:
                box.unsent = data

    def _try_send(self, client: bytes, data: bytes) -> bool:
        """Send one message; return False if the frontend's queue is full or it is gone."""
        try:
            return self._send(client, data)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False

    def _send(self, client: bytes, data: bytes) -> bool:
        """Send one message; return False if the frontend's queue is full.

        Raises ZMQError with EHOSTUNREACH if the frontend is gone.
        """
        try:
            # `send_multipart` makes the same two calls, but takes 4 us longer.
            self.router.send(client, FIRST_FRAME)
            self.router.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
