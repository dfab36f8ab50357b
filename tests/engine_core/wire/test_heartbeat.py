"""Heartbeats continue whatever the main thread does, and the last one is accurate."""

import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tandem.engine_core.stats import new_stats
from tandem.engine_core.wire.heartbeat import HeartbeatPublisher, Status
from tandem.protocol.codec import decode_event
from tandem.protocol.events import Heartbeat, Phase, SwapFacts
from tandem.protocol.sockets import Transport, connect_heartbeat
from tests.support.zmq_context import KeepingContext

WAIT_MS = 60_000


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="td-") as folder:
        yield f"ipc://{folder}/engine.beat"


@pytest.fixture
def context() -> Iterator[Any]:
    context = KeepingContext()
    yield context
    context.destroy(linger=0)


def next_beat(listener: Any) -> Heartbeat:
    assert listener.poll(WAIT_MS), "no beat"
    beat = decode_event(listener.recv())
    assert isinstance(beat, Heartbeat)
    return beat


def test_status_reports_the_phase_entered() -> None:
    status = Status(7, new_stats())
    assert (status.heartbeat().phase, status.heartbeat().percent, status.heartbeat().detail) == (Phase.STARTING, 0, "")
    status.enter(Phase.LOADING, 40, "weights")
    beat = status.heartbeat()
    assert (beat.engine_epoch, beat.phase, beat.percent, beat.detail) == (7, Phase.LOADING, 40, "weights")
    status.enter(Phase.READY)
    assert (status.heartbeat().percent, status.heartbeat().detail) == (0, ""), "nothing of the phase before is left"


def test_status_reports_the_swap_of_this_moment() -> None:
    status = Status(7, new_stats())
    assert status.heartbeat().swap is None
    facts = [SwapFacts("loading", "/new", percent, "/old", "3") for percent in (10, 20)]
    status.swap = iter(facts).__next__
    assert [status.heartbeat().swap for _ in facts] == facts


def test_pending_counts_running_and_waiting_requests() -> None:
    status = Status(7, new_stats())
    status.stats.running, status.stats.waiting = 3, 4
    assert status.heartbeat().pending == 7


def test_publisher_beats_while_the_main_thread_is_busy_and_once_at_the_end(endpoint: str, context: Any) -> None:
    status = Status(7, new_stats())
    heartbeat = HeartbeatPublisher(context, endpoint, Transport(), status)
    heartbeat.start()
    listener = connect_heartbeat(context, endpoint)
    beats = 0
    while beats < 2:  # pure Python, never waiting: only the other thread can beat
        try:
            beat = decode_event(listener.recv(zmq.NOBLOCK))
        except zmq.Again:
            continue
        assert isinstance(beat, Heartbeat)
        assert beat.phase is Phase.STARTING
        beats += 1
    status.stats.steps_committed = 41
    status.enter(Phase.FAILED, detail="the device is lost")
    heartbeat.stop()
    while (last := next_beat(listener)).phase is not Phase.FAILED:
        pass
    assert (last.detail, last.stats.steps_committed) == ("the device is lost", 41)


def test_announced_heartbeat_is_sent_at_once(endpoint: str, context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engine_core.wire.heartbeat.INTERVAL_SECONDS", 3600.0)
    status = Status(7, new_stats())
    heartbeat = HeartbeatPublisher(context, endpoint, Transport(), status)
    heartbeat.start()
    listener = connect_heartbeat(context, endpoint)
    try:
        for changes in (1, 2):
            status.stats.pause_changes = changes
            heartbeat.announce()  # again, while the listener is not connected yet
            while not listener.poll(100):
                heartbeat.announce()
            while (beat := next_beat(listener)).stats.pause_changes != changes:
                pass
            assert beat.engine_epoch == 7
    finally:
        heartbeat.stop()


def test_stop_frees_the_endpoint_and_is_idempotent(endpoint: str, context: Any) -> None:
    for epoch in (1, 2):
        heartbeat = HeartbeatPublisher(context, endpoint, Transport(), Status(epoch, new_stats()))
        start_when_free(heartbeat)
        listener = connect_heartbeat(context, endpoint)
        assert next_beat(listener).engine_epoch == epoch
        listener.close()
        heartbeat.stop()
        heartbeat.stop()


def start_when_free(heartbeat: HeartbeatPublisher) -> None:
    """Start the publisher, retrying while ZMQ still closes the earlier socket."""
    for _ in range(10_000):
        try:
            return heartbeat.start()
        except ValueError:
            time.sleep(0.001)
    raise AssertionError("the endpoint was never free again")


def test_stop_before_start_does_nothing(endpoint: str, context: Any) -> None:
    HeartbeatPublisher(context, endpoint, Transport(), Status(1, new_stats())).stop()
    assert not Path(endpoint.removeprefix("ipc://")).exists()


def test_start_raises_for_an_endpoint_in_use(endpoint: str, context: Any) -> None:
    first = HeartbeatPublisher(context, endpoint, Transport(), Status(1, new_stats()))
    first.start()
    try:
        with pytest.raises(ValueError, match=re.escape(endpoint)):
            HeartbeatPublisher(context, endpoint, Transport(), Status(2, new_stats())).start()
    finally:
        first.stop()
