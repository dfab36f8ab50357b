"""Bursts of clients that wait as long as Retry-After tells them."""

import pytest

from tandem.protocol.events import Limits
from tests.support.overload_burst import SERVICE, Burst

CASES = [
    # burst, most open sequences, rows, seconds of a sequence, and so 16, 3, 32, 256, 51, 12.8, 128 and 51 ends a second
    (100, 64, 16, 1.0),
    (100, 64, 16, 5.0),
    (500, 256, 64, 2.0),
    (1500, 1024, 256, 1.0),
    (1500, 1024, 256, 5.0),
    (1500, 1024, 256, 20.0),
    (5000, 1024, 256, 2.0),
    (5000, 1024, 256, 5.0),
]


@pytest.mark.parametrize("frontends", [1, 4])
@pytest.mark.parametrize("service", SERVICE)
@pytest.mark.parametrize(("size", "max_concurrent", "rows", "seconds"), CASES)
def test_at_most_a_third_of_the_returns_is_refused_again(
    size: int, max_concurrent: int, rows: int, seconds: float, service: str, frontends: int
) -> None:
    """The first burst of a server, of which no rate is known yet."""
    limits = Limits(rows, 2**20, 16, 8192, max_waiting=max_concurrent, max_concurrent=max_concurrent)
    outcome = Burst(limits, seconds, service, frontends, seed=size).run(size)
    assert outcome.started == size
    assert outcome.retries >= size - max_concurrent - rows
    assert outcome.refused_retries <= outcome.retries / 3
    assert outcome.most_refusals <= 4


@pytest.mark.parametrize("service", SERVICE)
def test_a_second_burst_starts_as_fast_as_the_first_one_has_ended(service: str) -> None:
    """Its times follow the rate that the first one had, so that few rows are left empty."""
    limits = Limits(256, 2**20, 16, 8192, max_waiting=1024, max_concurrent=1024)
    burst = Burst(limits, 1.0, service, 1, seed=7)
    first = burst.run(1500)
    burst.run(1500)
    begun = burst.now
    outcome = burst.run(1500)
    assert outcome.refused_retries <= outcome.retries / 3
    assert outcome.seconds - begun < 0.5 * first.seconds
