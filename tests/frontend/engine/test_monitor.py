"""The listener to heartbeats, with a socket of the test's own."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tandem.frontend.engine import monitor as engine_monitor
from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.engine.monitor import EngineMonitor
from tandem.protocol.codec import encode
from tandem.protocol.events import Heartbeat, Phase
from tandem.protocol.stats import EngineStats
from tests.fakes.clock import FakeClock


class Subscriber:
    """A socket that yields messages from a queue."""

    def __init__(self, messages: list[bytes]) -> None:
        self.messages = messages
        self.closed = False

    async def recv(self) -> bytes:
        while not self.messages:
            await asyncio.sleep(0.001)
        return self.messages.pop(0)

    def close(self, linger: int = 0) -> None:
        self.closed = True

    def get_monitor_socket(self, _events: int) -> "Subscriber":
        return Subscriber([])

    def disable_monitor(self) -> None:
        return None

    async def recv_multipart(self, _flags: int) -> list[bytes]:
        return await asyncio.get_running_loop().create_future()


def heartbeat(percent: int) -> Heartbeat:
    return Heartbeat(1, Phase.LOADING, percent, "", 0, EngineStats())


def listen(
    subscriber: Any,
    on_heartbeat: Callable[[Heartbeat], None],
    on_tick: Callable[[], None],
    watch: EngineWatch,
    until: Callable[[], bool],
) -> None:
    """Run a monitor until a condition holds, then cancel it."""

    async def run() -> None:
        task = asyncio.create_task(EngineMonitor(watch, on_heartbeat, on_tick).run(subscriber))
        async with asyncio.timeout(120):
            while not until():
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_a_monitor_survives_unreadable_messages_and_failing_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_monitor, "TICK_SECONDS", 0.01)
    heard: list[int] = []
    ticks: list[int] = []

    def fail_first(event: Heartbeat) -> None:
        heard.append(event.percent)
        if len(heard) == 1:
            raise ValueError("a bug")

    def fail_always() -> None:
        ticks.append(1)
        raise ValueError("a bug")

    subscriber = Subscriber([encode(heartbeat(1)), b"\xc1", encode(heartbeat(2))])
    listen(subscriber, fail_first, fail_always, EngineWatch(5.0, 60.0), lambda: len(heard) > 1 and len(ticks) > 1)
    assert heard == [1, 2]
    assert subscriber.closed


def test_a_late_tick_resets_the_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_monitor, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(engine_monitor, "_MAX_LAG", -1.0)
    clock = FakeClock()
    watch = EngineWatch(5.0, 60.0, clock)
    watch.observe(heartbeat(1))
    clock.advance(100.0)
    assert watch.silence() == 100.0
    listen(Subscriber([]), watch.observe, lambda: None, watch, lambda: watch.silence() == 0.0)
