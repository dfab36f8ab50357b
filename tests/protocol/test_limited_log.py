"""Lines of the log that peers cause."""

import logging

import pytest

from tandem.protocol.limited_log import LimitedLog
from tests.fakes.clock import FakeClock


def test_a_kind_gets_one_line_in_an_interval_and_the_next_counts_the_others(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    log = LimitedLog(logging.getLogger("test"), clock, 10.0)
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
