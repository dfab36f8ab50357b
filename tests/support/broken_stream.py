"""Streams whose engine fails after the client has received the first bytes."""

from typing import Any

import httpx

from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import open_stream

LONG = 1500
"""Tokens of an answer that is still running when the client has read its beginning."""


def slow_down(engine: FakeEngine) -> None:
    """Let an answer of `LONG` tokens take 30 s, so that it can be broken in its middle."""
    engine.step_seconds = 0.02


def post_broken_stream(engine: FakeEngine, url: str, body: dict[str, Any]) -> httpx.Response:
    """Stream an answer of `LONG` tokens and break it once its first bytes are here; return the whole response.

    A failure that reaches the frontend together with the first token is an HTTP status instead.
    """
    slow_down(engine)
    with open_stream("POST", url, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        parts = response.iter_bytes()
        content = next(parts)
        engine.break_after = 1
        content += b"".join(parts)
    return httpx.Response(response.status_code, headers=response.headers, content=content)
