"""Server-sent events that replies of every shape share."""

import msgspec

from tandem.frontend.errors import ApiError

DONE = b"data: [DONE]\n\n"


def named_event(name: str, value: object) -> bytes:
    """An event of a stream whose events have names."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))


def error_event(error: ApiError) -> bytes:
    """How an error is told once the status has been sent: an event with the error body, and the end."""
    return b"data: " + error.body() + b"\n\n" + DONE
