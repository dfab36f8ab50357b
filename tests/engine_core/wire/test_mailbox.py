"""The engine's end of the wire over real sockets."""

import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tandem.engine_core.contracts import TokenDelta
from tandem.engine_core.wire.launch_record import LaunchRecord
from tandem.engine_core.wire.mailbox import MAX_DRAINED_MESSAGES, ZmqMailbox
from tandem.engine_core.wire.wakeup import LoopWaker
from tandem.protocol.codec import decode_event, encode, runs
from tandem.protocol.commands import Abort, AnyCommand, Goodbye, Hello
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished, Launched, Refused, Started, StepOutput
from tandem.protocol.sockets import (
    ENCRYPTION_BYTES,
    MAX_COMMAND_BYTES,
    RECEIVE_HIGH_WATER_MARK,
    SEND_HIGH_WATER_MARK,
    bind_router,
    connect_dealer,
)
from tests.support.zmq_context import ipc_context

WAIT_MS = 60_000


class Wire:
    """One mailbox, and frontends that have sent it a message."""

    def __init__(self, context: Any, endpoint: str) -> None:
        self.context = context
        self.endpoint = endpoint
        self.router = bind_router(context, endpoint)
        self.wakeup = LoopWaker.open()
        self.mailbox = ZmqMailbox(self.router, self.wakeup)
        self.dealers: list[Any] = []

    def dealer(self) -> Any:
        self.dealers.append(connect_dealer(self.context, self.endpoint))
        return self.dealers[-1]

    def greeted(self, keeps: int = 1000) -> tuple[Any, bytes]:
        """Connect a frontend whose own queue holds this many messages."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.rcvhwm = keeps
        dealer.connect(self.endpoint)
        dealer.send(encode(Hello(1, 1, "x")))
        ((client, _),) = self.drained(1)
        return dealer, client

    def drained(self, count: int) -> list[tuple[bytes, AnyCommand]]:
        """Drain until at least this many commands have arrived."""
        commands: list[tuple[bytes, AnyCommand]] = []
        while len(commands) < count:
            assert self.router.poll(WAIT_MS), f"only {len(commands)} of {count} commands arrived"
            commands += self.mailbox.drain()
        return commands


@pytest.fixture
def wire() -> Iterator[Wire]:
    with ipc_context() as (context, endpoint):
        wire = Wire(context, endpoint)
        yield wire
        wire.wakeup.close()


def receive(dealer: Any) -> StepOutput:
    assert dealer.poll(WAIT_MS), "nothing arrived"
    output = decode_event(dealer.recv())
    assert isinstance(output, StepOutput)
    return output


def send_all(dealer: Any, bodies: list[bytes | list[bytes]]) -> None:
    for body in bodies:
        dealer.send_multipart(body if isinstance(body, list) else [body])


class TestDrain:
    def test_drain_of_an_empty_mailbox_returns_nothing(self, wire: Wire) -> None:
        assert list(wire.mailbox.drain()) == []

    def test_drain_returns_commands_in_order_with_their_senders(self, wire: Wire) -> None:
        first, second = wire.dealer(), wire.dealer()
        sent = [Hello(1, 2, "x"), Abort([1, 2]), Goodbye()]
        for dealer in (first, second):
            send_all(dealer, [encode(command) for command in sent])
        received = wire.drained(6)
        for dealer in (first, second):
            assert [command for client, command in received if client == dealer.identity] == sent

    def test_drain_takes_a_flood_in_parts(self, wire: Wire) -> None:
        dealer = wire.dealer()
        send_all(dealer, [encode(Abort([number])) for number in range(2 * MAX_DRAINED_MESSAGES + 10)])
        received: list[AnyCommand] = []
        while len(received) < 2 * MAX_DRAINED_MESSAGES + 10:
            assert wire.router.poll(WAIT_MS)
            part = list(wire.mailbox.drain())
            assert len(part) <= MAX_DRAINED_MESSAGES
            received += [command for _, command in part]
        assert received == [Abort([number]) for number in range(2 * MAX_DRAINED_MESSAGES + 10)]

    def test_what_a_drain_leaves_is_taken_by_the_next(self, wire: Wire) -> None:
        dealer = wire.dealer()
        send_all(dealer, [encode(Abort([number])) for number in range(10)])
        received: list[AnyCommand] = []
        while len(received) < 10:
            assert wire.router.poll(WAIT_MS)
            _, command = next(wire.mailbox.drain())
            received.append(command)
        assert received == [Abort([number]) for number in range(10)]

    def test_commands_beyond_the_high_water_mark_wait_with_their_sender(self, wire: Wire) -> None:
        """A frontend's sends never fail, and the engine loses nothing, however far behind its loop is."""
        dealer = wire.dealer()
        count = 40 * RECEIVE_HIGH_WATER_MARK
        for number in range(count):
            dealer.send(encode(Abort([number, *range(100)])), zmq.DONTWAIT)
        assert wire.router.rcvhwm == RECEIVE_HIGH_WATER_MARK
        received = [command for _, command in wire.drained(count)]
        assert received == [Abort([number, *range(100)]) for number in range(count)]

    def test_a_message_above_the_limit_ends_its_connection_and_no_other(self, wire: Wire) -> None:
        other, dealer = wire.dealer(), wire.dealer()
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        send_all(other, [encode(Abort([1]))])
        wire.drained(1)
        dealer.send(b"\0" * (MAX_COMMAND_BYTES + ENCRYPTION_BYTES + 1))
        assert monitor.poll(WAIT_MS), "the connection stays open"
        send_all(other, [encode(Abort([2]))])
        assert [command for _, command in wire.drained(1)] == [Abort([2])]
        dealer.disable_monitor()

    def test_malformed_messages_are_ignored(self, wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
        dealer = wire.dealer()
        junk: list[bytes | list[bytes]] = [b"", b"\xff" * 9, [b"a", b"b"], [b"", encode(Goodbye())], b"\x91" * 5000]
        send_all(dealer, [*junk, encode(Abort([5]))])
        assert [command for _, command in wire.drained(1)] == [Abort([5])]
        first_of_each_kind = [record.getMessage() for record in caplog.records]
        assert len(first_of_each_kind) == 2
        assert " 0 bytes" in first_of_each_kind[0]
        assert "3 frames" in first_of_each_kind[1]
        assert all(dealer.identity.hex() in line for line in first_of_each_kind)

    def test_flood_of_malformed_messages_does_not_block_the_loop(self) -> None:
        """Ignored messages count: one drain takes at most its limit, whatever they are."""
        calls = []

        class Endless:
            def get(self, _option: int) -> int:
                return zmq.POLLIN

            def recv_multipart(self, _flags: int) -> list[bytes]:
                calls.append(1)
                assert len(calls) <= 10 * MAX_DRAINED_MESSAGES, "one drain goes on and on"
                return [b"client", b"junk"]

        wakeup = LoopWaker.open()
        assert list(ZmqMailbox(Endless(), wakeup).drain()) == []
        assert len(calls) <= MAX_DRAINED_MESSAGES + 1
        wakeup.close()

    def test_wait_ends_when_a_command_arrives(self, wire: Wire) -> None:
        wire.dealer().send(encode(Goodbye()))
        wire.mailbox.wait(WAIT_MS / 1000)
        assert [command for _, command in wire.mailbox.drain()] == [Goodbye()]

    def test_wake_from_another_thread_ends_the_wait(self, wire: Wire) -> None:
        thread = threading.Thread(target=wire.mailbox.wake)
        thread.start()
        wire.mailbox.wait(WAIT_MS / 1000)
        thread.join()
        assert list(wire.mailbox.drain()) == []

    def test_wake_before_the_wait_ends_that_wait_only(self, wire: Wire) -> None:
        for _ in range(200_000):
            wire.mailbox.wake()
        wire.mailbox.wait(WAIT_MS / 1000)
        assert not select.select([wire.wakeup.reader], [], [], 0)[0], "the next wait would end at once"

    def test_wake_after_close_does_nothing(self, wire: Wire) -> None:
        wire.wakeup.close()
        wire.mailbox.wake()
        assert wire.wakeup.reader.fileno() == -1


class TestLaunches:
    def test_requests_of_a_lost_connection_are_reported_to_its_owner_before_anything_else(
        self, wire: Wire, tmp_path: Path
    ) -> None:
        before = LaunchRecord(tmp_path)
        before.open()
        wire.mailbox = ZmqMailbox(wire.router, wire.wakeup, launches=before)
        peers = [wire.dealer() for _ in range(2)]
        for dealer in peers:
            send_all(dealer, [encode(Hello(1, 1, "x"))])
        wire.drained(2)
        for number, dealer in enumerate(peers):
            wire.mailbox.add_start(dealer.identity, Started(7 + number, 0))  # and the engine dies before any flush
        after = LaunchRecord(tmp_path)
        after.open()
        wire.mailbox = ZmqMailbox(wire.router, wire.wakeup, launches=after)
        new, other = wire.dealer(), wire.dealer()
        send_all(new, [encode(Hello(1, 2, "x", peers[1].identity))])
        send_all(other, [encode(Hello(1, 2, "x", b"f" * 16))])
        for client, _ in wire.drained(2):
            wire.mailbox.reply(client, Refused("the next message"))
        assert [decode_event(new.recv()), decode_event(new.recv())] == [Launched([8]), Refused("the next message")]
        assert decode_event(other.recv()) == Refused("the next message")
        before.close()
        after.close()


class TestFlush:
    def test_flush_sends_one_message_to_each_frontend(self, wire: Wire) -> None:
        peers = [wire.greeted() for _ in range(2)]
        for _, client in peers:
            wire.mailbox.add_tokens(client, TokenDelta([1, 2], [10, 20]))
            wire.mailbox.add_tokens(client, TokenDelta([1], [11]))
            wire.mailbox.add_outcome(client, Finished(1, FinishReason.STOP, 11))
            wire.mailbox.add_outcome(client, Failure(2, ErrorCode.ENGINE_FAILED, "x"))
            wire.mailbox.add_start(client, Started(3, 64))
        assert wire.mailbox.flush(6) == {}
        assert not wire.mailbox.has_backlog
        for dealer, _ in peers:
            output = receive(dealer)
            assert output.step_id == 6
            assert list(runs(output)) == [(1, [10]), (2, [20]), (1, [11])]
            assert output.finished == [Finished(1, FinishReason.STOP, 11)]
            assert output.failures == [Failure(2, ErrorCode.ENGINE_FAILED, "x")]
            assert output.started == [Started(3, 64)]
        assert wire.mailbox.flush(7) == {}
        wire.mailbox.add_tokens(peers[0][1], TokenDelta([5], [50]))
        wire.mailbox.flush(8)
        assert receive(peers[0][0]).step_id == 8, "nothing came between, and nothing twice"
        assert not peers[1][0].poll(0)

    def test_slow_frontend_gets_everything_later(self, wire: Wire) -> None:
        slow, slow_client = wire.greeted(keeps=1)
        other, other_client = wire.greeted()
        steps = 0
        while not wire.mailbox.has_backlog or steps % 50:
            steps += 1
            wire.mailbox.add_tokens(slow_client, TokenDelta(list(range(500)), [steps] * 500))
            wire.mailbox.add_tokens(other_client, TokenDelta([1], [steps]))
            assert wire.mailbox.flush(steps) == {}
            assert list(runs(receive(other))) == [(1, [steps])], "others are not held up"
        assert steps > SEND_HIGH_WATER_MARK
        wire.mailbox.add_outcome(slow_client, Finished(1, FinishReason.LENGTH))
        assert wire.mailbox.flush(steps) == {}
        assert wire.mailbox.has_backlog
        seen: dict[int, list[int]] = {}
        messages, finished = 0, []
        while not finished:
            output = receive(slow)
            messages += 1
            for request_id, tokens in runs(output):
                seen.setdefault(request_id, []).extend(tokens)
            finished = output.finished
            assert wire.mailbox.flush(steps) == {}
        assert seen == {request_id: list(range(1, steps + 1)) for request_id in range(500)}
        assert finished == [Finished(1, FinishReason.LENGTH)]
        assert messages < steps, "some steps were merged"
        assert not wire.mailbox.has_backlog

    def test_flush_returns_and_forgets_a_frontend_that_is_gone(self, wire: Wire) -> None:
        gone, gone_client = wire.greeted()
        other, other_client = wire.greeted()
        gone.close()
        lost: dict[bytes, str] = {}
        while not lost:
            wire.mailbox.add_tokens(gone_client, TokenDelta([1], [5]))
            wire.mailbox.add_tokens(other_client, TokenDelta([1], [5]))
            lost = wire.mailbox.flush(1)
            assert list(runs(receive(other))) == [(1, [5])]
            assert list(wire.mailbox.drain()) == []
        assert lost.keys() == {gone_client} and "disconnected" in lost[gone_client]
        assert not wire.mailbox.has_backlog
        assert wire.mailbox.flush(2) == {}

    def test_flush_returns_an_unknown_frontend_as_gone(self, wire: Wire) -> None:
        wire.mailbox.add_outcome(b"nobody", Finished(1, FinishReason.ABORT))
        assert wire.mailbox.flush(1) == {}
        assert wire.mailbox.has_backlog
        assert list(wire.mailbox.drain()) == []
        gone = wire.mailbox.flush(1)
        assert gone.keys() == {b"nobody"} and "disconnected" in gone[b"nobody"]
        assert not wire.mailbox.has_backlog

    def test_output_before_its_first_flush_is_no_backlog(self, wire: Wire) -> None:
        """A backlog is what a flush kept, not what waits for one (`contracts.Mailbox`)."""
        _, client = wire.greeted()
        wire.mailbox.add_tokens(client, TokenDelta([1], [5]))
        assert not wire.mailbox.has_backlog


class TestReply:
    def test_reply_arrives_at_once(self, wire: Wire) -> None:
        dealer, client = wire.greeted()
        wire.mailbox.reply(client, Refused("no"))
        assert dealer.poll(WAIT_MS)
        assert decode_event(dealer.recv()) == Refused("no")

    def test_reply_to_an_unknown_frontend_is_dropped(self, wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
        wire.mailbox.reply(b"nobody", Refused("no"))
        assert "Refused" in caplog.text
        assert not wire.mailbox.has_backlog
