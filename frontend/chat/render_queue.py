"""Queue of conversations for the process that renders them.

The process answers in the order in which it was asked, so the first of those that it was given is the one that it
renders.
"""

import asyncio
from collections import deque

from msgspec import Struct

from tandem.protocol.fair_queue import FairQueue

MAX_BYTES_AHEAD = 256 * 1024
"""Bytes of requests that a process is given in advance, so that it need not wait for the next one."""
MAX_GIVEN = 4
"""Conversations that a process has at most, the one that it renders among them: the turn of a key waits for these."""
FEW_GIVEN = 1
"""Conversations of a process at which it is given more, together in one write."""


class RenderJob(Struct, eq=False):
    """One conversation to be rendered."""

    request: bytes
    """Frame that asks for it."""
    prompt: "asyncio.Future[str]"
    """Result; cancelled if its request was given up."""
    client: str = ""
    """Name of the API key; "" without one."""
    num_deaths: int = 0
    """Processes that ended while they rendered it."""


class RenderQueue:
    """Order of the conversations of one frontend.

    API keys take turns: one with many conversations delays those of others by a few at most. Of one key, or without
    keys, the first comes first.
    """

    def __init__(self) -> None:
        self._again: deque[RenderJob] = deque()
        """Conversations that an ended process had; they come before all others."""
        self._waiting: FairQueue[RenderJob] = FairQueue()
        """Other conversations, by key."""
        self._given: deque[RenderJob] = deque()
        self._bytes_ahead = 0

    def __len__(self) -> int:
        return len(self._again) + len(self._waiting) + len(self._given)

    @property
    def current(self) -> RenderJob | None:
        """The conversation that the process renders."""
        return self._given[0] if self._given else None

    def add(self, job: RenderJob) -> None:
        """Append a conversation to those of its key."""
        self._waiting.add(job.client, job)

    def retry(self, job: RenderJob) -> None:
        """Put a conversation before all others."""
        self._again.appendleft(job)

    def give(self) -> list[bytes]:
        """Return the requests that the process may be given now.

        It is given none while it has more than FEW_GIVEN. A conversation that was given up is dropped.
        """
        requests: list[bytes] = []
        if len(self._given) > FEW_GIVEN:
            return requests
        while len(self._given) < MAX_GIVEN and (job := self._first()) is not None:
            if not job.prompt.done():
                if self._given and self._bytes_ahead + len(job.request) > MAX_BYTES_AHEAD:
                    break
                self._given.append(job)
                self._bytes_ahead += len(job.request)
                requests.append(job.request)
            self._remove_first()
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
        self._again.extendleft(reversed(self._given))
        self._given.clear()
        self._bytes_ahead = 0
        return guilty

    def take_all(self) -> list[RenderJob]:
        """Remove all conversations."""
        jobs = [*self._given, *self._again, *self._waiting]
        for removed in (self._given, self._again, self._waiting):
            removed.clear()
        self._bytes_ahead = 0
        return jobs

    def _first(self) -> RenderJob | None:
        """Return the conversation whose turn it is."""
        if self._again:
            return self._again[0]
        found = self._waiting.peek()
        return None if found is None else found[1]

    def _remove_first(self) -> None:
        """Remove the conversation whose turn it is; another key's turn is next."""
        if self._again:
            self._again.popleft()
            return
        found = self._waiting.take()
        assert found is not None, "no conversation waits"
        self._waiting.charge(found[0], 1.0)
