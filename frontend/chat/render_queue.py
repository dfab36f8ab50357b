"""Queue of conversations for the process that renders them.

The process answers in the order in which it was asked, so the first of those that it was given is the one that it
renders.
"""

import asyncio
from collections import deque

from msgspec import Struct

MAX_BYTES_AHEAD = 256 * 1024
"""Bytes of requests that a process is given in advance, so that it need not wait for the next one."""


class RenderJob(Struct, eq=False):
    """One conversation to be rendered."""

    request: bytes
    """Frame that asks for it."""
    prompt: "asyncio.Future[str]"
    """Result; cancelled if its request was given up."""


class RenderQueue:
    """Order of the conversations of one frontend."""

    def __init__(self) -> None:
        self._waiting: deque[RenderJob] = deque()
        self._given: deque[RenderJob] = deque()
        self._bytes_ahead = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._given)

    @property
    def current(self) -> RenderJob | None:
        """The conversation that the process renders."""
        return self._given[0] if self._given else None

    def add(self, job: RenderJob) -> None:
        """Append a conversation."""
        self._waiting.append(job)

    def give(self) -> list[bytes]:
        """Return the requests that the process may be given now.

        One that was given up is dropped.
        """
        requests = []
        while self._waiting:
            job = self._waiting[0]
            if not job.prompt.done():
                if self._given and self._bytes_ahead + len(job.request) > MAX_BYTES_AHEAD:
                    break
                self._given.append(job)
                self._bytes_ahead += len(job.request)
                requests.append(job.request)
            self._waiting.popleft()
        return requests

    def finish(self) -> RenderJob:
        """Remove the conversation that the process has answered."""
        job = self._given.popleft()
        self._bytes_ahead -= len(job.request)
        return job

    def take_back(self) -> RenderJob | None:
        """Return the conversation that a process was rendering when it ended.

        The others that it was given go to its successor, in their order.
        """
        guilty = self.finish() if self._given else None
        self._waiting.extendleft(reversed(self._given))
        self._given.clear()
        self._bytes_ahead = 0
        return guilty

    def take_all(self) -> list[RenderJob]:
        """Remove all conversations."""
        jobs = [*self._given, *self._waiting]
        self._given.clear()
        self._waiting.clear()
        self._bytes_ahead = 0
        return jobs
