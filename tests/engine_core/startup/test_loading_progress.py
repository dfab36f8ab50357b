"""Progress of loading in heartbeats, under a clock of the test's own."""

from tandem.engine_core.startup.kv_sizing import GIB
from tandem.engine_core.startup.loading_progress import LoadingProgress
from tandem.engine_core.stats import new_stats
from tandem.engine_core.wire.heartbeat import Status
from tandem.protocol.events import Phase
from tests.fakes.clock import FakeClock


def test_progress_has_percent_amount_and_rate_of_what_follows_the_first_piece() -> None:
    status, clock = Status(1, new_stats()), FakeClock()
    progress = LoadingProgress(status, clock)
    clock.advance(30.0)
    progress.report(GIB // 4, 2 * GIB)
    assert (status.phase, status.percent, status.detail) == (Phase.LOADING, 12, "0.25 of 2.00 GiB")
    clock.advance(2.0)
    progress.report(GIB, 2 * GIB)
    assert (status.percent, status.detail) == (50, "1.00 of 2.00 GiB, 0.38 GiB/s")
    clock.advance(1.5)
    progress.report(2 * GIB, 2 * GIB)
    assert (status.percent, status.detail) == (100, "2.00 of 2.00 GiB, 0.50 GiB/s")
