"""Headers with what is left of a key's limits."""

import pytest

from tandem.frontend.access.rate_limit_headers import duration, rate_limit_headers
from tandem.protocol.codec import decode_event, encode
from tandem.protocol.events import KeyUsage


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (0.0004, "0s"), (0.02, "20ms"), (0.1204, "120ms"), (0.9996, "1s"), (1, "1s"), (7.663, "7.66s"),
        (59.999, "1m0s"), (60, "1m0s"), (360, "6m0s"), (3723, "1h2m3s"),
    ],
)  # fmt: skip
def test_times_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def headers(usage: KeyUsage, is_anthropic: bool = False) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in rate_limit_headers(usage, is_anthropic)}


def test_headers_tell_each_limit_with_the_time_until_all_of_it_is_there_again() -> None:
    assert headers(KeyUsage("alice", 3, 1, 1000, 400, 42.5, 0.85)) == {
        "x-ratelimit-limit-requests": "3", "x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": "850ms",
        "x-ratelimit-limit-tokens": "1000", "x-ratelimit-remaining-tokens": "400", "x-ratelimit-reset-tokens": "42.5s",
    }  # fmt: skip
    assert headers(KeyUsage("alice", 3, 1, 0, 0, 0.0, 0.85), is_anthropic=True) == {
        "anthropic-ratelimit-requests-limit": "3", "anthropic-ratelimit-requests-remaining": "1",
    }  # fmt: skip


def test_time_that_nothing_is_known_of_has_no_header() -> None:
    """An engine that does not send the estimate yet leaves it out as well."""
    usage = decode_event(encode(KeyUsage("alice", 3, 1, 0, 0, 0.0)))
    assert isinstance(usage, KeyUsage)
    assert headers(usage) == {"x-ratelimit-limit-requests": "3", "x-ratelimit-remaining-requests": "1"}
