"""Which stages of a start are logged at which level."""

import logging

import pytest

from tandem.engine_core.startup.start_log import StartLog
from tests.fakes.clock import FakeClock
from tests.support.refusals import numbers_in


def test_short_stages_are_details(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="tandem")
    clock, held = FakeClock(), [0]
    log = StartLog(clock, lambda: held[0])
    clock.advance(2.0)
    log.mark("weights")
    held[0] += 2**30
    log.mark("tables")
    clock.advance(0.01)
    log.mark("trial")
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "DEBUG"]
    assert [numbers_in(message) for message in caplog.messages] == [[2, 0], [0, 1], [0.01, 0]]
    assert [message.split()[1] for message in caplog.messages] == ["weights", "tables", "trial"]
