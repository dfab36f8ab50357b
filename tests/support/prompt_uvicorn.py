"""Uvicorn without its waits.

Its server looks ten times a second whether it is to end, and then gives connections as long to close. Of a test that
starts a server of its own these 0.15 s were most of the time.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn.server

LONGEST_WAIT = 0.01
"""Seconds."""


class _PromptAsyncio:
    """The module `asyncio`, but that nothing sleeps for long."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, LONGEST_WAIT))


@contextmanager
def prompt_uvicorn() -> Iterator[None]:
    """Shorten the waits of uvicorn's own code, and of no other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", _PromptAsyncio())
        yield
