"""Rate limit headers of an API key."""

from tandem.protocol.events import KeyUsage

EXPOSED = tuple(
    f"x-ratelimit-{part}-{unit}" for part in ("limit", "remaining", "reset") for unit in ("requests", "tokens")
)
"""Names of OpenAI's rate limit headers."""


def rate_limit_headers(usage: KeyUsage, is_anthropic: bool) -> list[tuple[bytes, bytes]]:
    """Build the rate limit headers of OpenAI's or Anthropic's API.

    Requests are counted as sequences in progress. Limits that the key lacks and unknown times have no headers.
    """
    rows: list[tuple[str, int, int, float | None]] = []
    if usage.limit_requests:
        rows.append(("requests", usage.limit_requests, usage.remaining_requests, usage.reset_requests))
    if usage.limit_tokens:
        rows.append(("tokens", usage.limit_tokens, usage.remaining_tokens, usage.reset_tokens))
    found: list[tuple[str, str]] = []
    for unit, limit, remaining, reset in rows:
        if is_anthropic:
            found += [(f"anthropic-ratelimit-{unit}-limit", str(limit))]
            found += [(f"anthropic-ratelimit-{unit}-remaining", str(remaining))]
        else:
            found += [(f"x-ratelimit-limit-{unit}", str(limit)), (f"x-ratelimit-remaining-{unit}", str(remaining))]
            found += [] if reset is None else [(f"x-ratelimit-reset-{unit}", duration(reset))]
    return [(name.encode(), value.encode()) for name, value in found]


def duration(seconds: float) -> str:
    """Format a duration as OpenAI does: 20ms, 7.66s, 6m0s, 1h2m3s."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(round(seconds, 2), 60)
    if not minutes:
        return f"{rest:g}s"
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}h{minutes}m{int(rest)}s" if hours else f"{minutes}m{int(rest)}s"
