"""Which stages of a start are logged at which level."""

import logging

import pytest

from tandem.engine_core.startup.start_log import StartLog
from tests.fakes.clock import FakeClock


def test_short_stages_are_details(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    clock, held = FakeClock(), [0]
    log = StartLog(clock, lambda: held[0])
    clock.advance(2.0)
    log.mark("weights")
    held[0] += 2**30
    log.mark("tables")
    clock.advance(0.01)
    log.mark("trial")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "start: weights took 2.00 s and 0.00 GiB"),
        ("INFO", "start: tables took 0.00 s and 1.00 GiB"),
        ("DEBUG", "start: trial took 0.01 s and 0.00 GiB"),
    ]
