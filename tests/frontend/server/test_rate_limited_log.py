"""The log of what clients can cause: few lines, but every message counted."""

import asyncio
import logging

import pytest

from tandem.frontend.server.rate_limited_log import RateLimitedLog

NAME = "rate-limited"


def test_flood_is_two_lines_with_its_number(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        log = RateLimitedLog(logging.getLogger(NAME), 0.02)
        for number in range(1000):
            log.warning("flood", f"message {number}")
        log.warning("other", "another kind")
        async with asyncio.timeout(30):
            while len(caplog.messages) < 3:
                await asyncio.sleep(0.001)

    with caplog.at_level(logging.WARNING, NAME):
        asyncio.run(run())
    assert caplog.messages == ["message 0", "another kind", "message 999 (the last of 999 more in 0 s)"]


def test_message_after_a_quiet_interval_is_written_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        log = RateLimitedLog(logging.getLogger(NAME), 0.001)
        log.warning("kind", "first %s")
        async with asyncio.timeout(30):
            while log._held:
                await asyncio.sleep(0.001)
        log.warning("kind", "second")

    with caplog.at_level(logging.WARNING, NAME):
        asyncio.run(run())
    assert caplog.messages == ["first %s", "second"]
