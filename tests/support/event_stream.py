"""Event streams of the OpenAI routes, read whole."""

import json
from typing import Any

import httpx


def events(response: httpx.Response) -> list[Any]:
    """Decode the chunks of a stream, whose last event is [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]
