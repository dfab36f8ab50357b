"""Rate limits of log messages, and the counts of those omitted."""

import asyncio
import logging

import pytest

from tandem.protocol.rate_limited_log import RateLimitedLog
from tests.fakes.clock import FakeClock
from tests.support.refusals import numbers_in

NAME = "rate-limited"


def test_a_kind_gets_one_line_in_an_interval_and_the_next_counts_the_others(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    log = RateLimitedLog(logging.getLogger(NAME), clock, 10.0)
    for number in range(100):
        log.warning("junk", "junk %d", number)
    log.warning("other", "other")
    clock.advance(9.0)
    log.warning("junk", "junk %s", "late")
    clock.advance(1.0)
    log.warning("junk", "junk %s", "again")
    clock.advance(10.0)
    log.warning("junk", "junk %s", "alone")
    again = "junk again (and 100 more like it since the last such line)"
    assert caplog.messages == ["junk 0", "other", again, "junk alone"]


def test_flood_is_two_lines_with_its_number(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        log = RateLimitedLog(logging.getLogger(NAME), interval=0.02, at_interval_end=True)
        for number in range(1000):
            log.warning("flood", "message %d", number)
        log.warning("other", "another kind")
        async with asyncio.timeout(120):
            while len(caplog.messages) < 3:
                await asyncio.sleep(0.001)

    with caplog.at_level(logging.WARNING, NAME):
        asyncio.run(run())
    assert caplog.messages[:2] == ["message 0", "another kind"]
    (rest,) = caplog.messages[2:]
    assert rest.startswith("message 999 (") and numbers_in(rest) == [999, 999, 0]


def test_message_after_a_quiet_interval_is_written_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        log = RateLimitedLog(logging.getLogger(NAME), interval=0.001, at_interval_end=True)
        log.warning("kind", "%s", "first %s")
        async with asyncio.timeout(120):
            while log.num_kinds:
                await asyncio.sleep(0.001)
        log.warning("kind", "second")

    with caplog.at_level(logging.WARNING, NAME):
        asyncio.run(run())
    assert caplog.messages == ["first %s", "second"]
