"""Headers that tell clients what is left of the limits of their API key."""

from tandem.protocol.events import KeyUsage

EXPOSED = tuple(
    f"x-ratelimit-{part}-{unit}" for part in ("limit", "remaining", "reset") for unit in ("requests", "tokens")
)
"""Names of OpenAI's headers."""


def rate_limit_headers(usage: KeyUsage, seconds_until_ended: int, is_anthropic: bool) -> list[tuple[bytes, bytes]]:
    """Build the headers of OpenAI's API or of Anthropic's.

    A request stands for one sequence in progress; `seconds_until_ended` estimates when all of them have ended. A limit
    that the key does not have has no headers.
    """
    rows: list[tuple[str, int, int, float]] = []
    if usage.limit_requests:
        seconds = seconds_until_ended if usage.remaining_requests < usage.limit_requests else 0
        rows.append(("requests", usage.limit_requests, usage.remaining_requests, seconds))
    if usage.limit_tokens:
        rows.append(("tokens", usage.limit_tokens, usage.remaining_tokens, usage.reset_tokens))
    found: list[tuple[str, str]] = []
    for unit, limit, remaining, reset in rows:
        if is_anthropic:
            found += [(f"anthropic-ratelimit-{unit}-limit", str(limit))]
            found += [(f"anthropic-ratelimit-{unit}-remaining", str(remaining))]
        else:
            found += [(f"x-ratelimit-limit-{unit}", str(limit)), (f"x-ratelimit-remaining-{unit}", str(remaining))]
            found += [(f"x-ratelimit-reset-{unit}", duration(reset))]
    return [(name.encode(), value.encode()) for name, value in found]


def duration(seconds: float) -> str:
    """Write a time as OpenAI does: 20ms, 7.66s, 6m0s, 1h2m3s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms" if seconds > 0 else "0s"
    minutes, rest = divmod(round(seconds, 2), 60)
    if not minutes:
        return f"{rest:g}s"
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}h{minutes}m{int(rest)}s" if hours else f"{minutes}m{int(rest)}s"
