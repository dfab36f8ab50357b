"""Queue of conversations for the template process.

The process replies in order, so the first of its conversations is the one that it is rendering.
"""

import asyncio
from collections import deque

from msgspec import Struct

from tandem.protocol.fair_queue import FairQueue

MAX_SENT_BYTES = 256 * 1024
"""Bytes of requests sent to the process in advance, so that it does not wait for the next one."""
MAX_SENT = 4
"""Maximum number of conversations sent to the process, including the current one: the turn of a key waits for these."""
REFILL_SENT = 1
"""Number of conversations in the process at which more are sent, in a single write."""


class RenderJob(Struct, eq=False):
    """Conversation to render."""

    request: bytes
    """Frame of its request."""
    prompt: "asyncio.Future[str]"
    """Result; cancelled if its request was abandoned."""
    client: str = ""
    """Name of the API key; "" without one."""
    num_deaths: int = 0
    """Number of processes that exited while rendering it."""


class RenderQueue:
    """Queue of the conversations of a frontend.

    API keys take turns: one with many conversations delays those of others by a few at most. Conversations of a key are
    in order of arrival.
    """

    def __init__(self) -> None:
        self._retries: deque[RenderJob] = deque()
        """Conversations of a process that exited; they come first."""
        self._waiting: FairQueue[RenderJob] = FairQueue()
        """Other conversations, by key."""
        self._sent: deque[RenderJob] = deque()
        self._sent_bytes = 0

    def __len__(self) -> int:
        return len(self._retries) + len(self._waiting) + len(self._sent)

    @property
    def current(self) -> RenderJob | None:
        """The conversation that the process renders."""
        return self._sent[0] if self._sent else None

    def add(self, job: RenderJob) -> None:
        """Append a conversation to its key's queue."""
        self._waiting.add(job.client, job)

    def retry(self, job: RenderJob) -> None:
        """Insert a conversation before all others."""
        self._retries.appendleft(job)

    def next_frames(self) -> list[bytes]:
        """Return the requests to send to the process now.

        None are sent while it has more than REFILL_SENT. Abandoned conversations are dropped.
        """
        requests: list[bytes] = []
        if len(self._sent) > REFILL_SENT:
            return requests
        while len(self._sent) < MAX_SENT and (job := self._first()) is not None:
            if not job.prompt.done():
                if self._sent and self._sent_bytes + len(job.request) > MAX_SENT_BYTES:
                    break
                self._sent.append(job)
                self._sent_bytes += len(job.request)
                requests.append(job.request)
            self._remove_first()
        return requests

    def finish(self) -> RenderJob:
        """Remove the conversation that the process has finished."""
        job = self._sent.popleft()
        self._sent_bytes -= len(job.request)
        return job

    def take_back(self) -> RenderJob | None:
        """Return the conversation that a process was rendering when it exited.

        Its other conversations go to its successor, in order.
        """
        guilty = self.finish() if self._sent else None
        self._retries.extendleft(reversed(self._sent))
        self._sent.clear()
        self._sent_bytes = 0
        return guilty

    def take_all(self) -> list[RenderJob]:
        """Remove all conversations."""
        jobs = [*self._sent, *self._retries, *self._waiting]
        for removed in (self._sent, self._retries, self._waiting):
            removed.clear()
        self._sent_bytes = 0
        return jobs

    def _first(self) -> RenderJob | None:
        """Return the next conversation."""
        if self._retries:
            return self._retries[0]
        found = self._waiting.peek()
        return None if found is None else found[1]

    def _remove_first(self) -> None:
        """Remove the next conversation; then it is another key's turn."""
        if self._retries:
            self._retries.popleft()
            return
        found = self._waiting.take()
        assert found is not None, "no conversation waits"
        self._waiting.charge(found[0], 1.0)
