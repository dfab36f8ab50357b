"""Event loop in virtual time, for tests of timers."""

import asyncio
import selectors
from contextvars import Context
from typing import Any


class VirtualClock(selectors.SelectSelector):
    """Selector for which time passes at once whenever nothing else is to be done."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let the time until the next timer pass."""
        assert timeout is not None, "nothing will ever happen"
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop with a virtual clock, which counts the timers that are set."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.timers: list[asyncio.TimerHandle] = []
        super().__init__(self.clock)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.clock.now

    def call_at(  # type: ignore[override]  # (the stub binds the types of a callback's arguments)
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Set a timer and keep it."""
        self.timers.append(super().call_at(when, callback, *args, context=context))
        return self.timers[-1]
