"""The workers of an engine, which follow the grammars that many requests share."""

import logging
import threading
from collections.abc import Callable, Collection

from tandem.engine_core.constraints.workers.link import WorkerLink
from tandem.engine_core.constraints.workers.remote_matcher import RemoteGrammar

logger = logging.getLogger(__name__)


class WorkerPool:
    """Up to `count` workers, started when the first grammar is given to them."""

    def __init__(self, count: int, start_link: Callable[[], WorkerLink]) -> None:
        self.count = count
        self._start_link = start_link
        self._links: list[WorkerLink] = []
        self._starting = threading.Lock()
        self._is_closed = False

    def compile(self, text: str, taken: Collection[WorkerLink]) -> RemoteGrammar | None:
        """Compile a grammar on another worker.

        It is the one with the fewest matchers, and of several such the one that got the fewest grammars.

        Runs on any thread but the loop's. None if all that have room are taken, or do not answer.

        Raises RequestError if the worker cannot compile it.
        """
        with self._starting:
            if self.count and not self._links and not self._is_closed:
                self._start()
        free = [link for link in self._links if link.has_room and link not in taken]
        # Several grammars may be compiled before the first matcher of any is opened.
        for link in sorted(free, key=lambda link: (link.num_open, link.num_grammars)):
            number = link.compile(text)
            if number is not None:
                return RemoteGrammar(link, number)
        return None

    def post(self) -> None:
        """Send all workers what was added to their batches."""
        for link in self._links:
            link.post()

    def wait(self) -> None:
        """Wait until all workers have done what was sent."""
        for link in self._links:
            link.wait()

    @property
    def has_written_all(self) -> bool:
        """True if the workers have written all masks of the batches that were waited for."""
        return not any(link.is_lost or link.num_refused for link in self._links)

    def close(self) -> None:
        """End all workers."""
        with self._starting:
            self._is_closed = True
            for link in self._links:
                link.close()

    def _start(self) -> None:
        links: list[WorkerLink] = []
        try:
            while len(links) < self.count:
                links.append(self._start_link())
        except OSError as error:
            text = "%d of %d workers for grammars could be started: %s; the engine follows other grammars itself"
            logger.error(text, len(links), self.count, error)
            self.count = len(links)
        else:
            logger.info("%d workers follow the grammars that many requests share", self.count)
        self._links = links
