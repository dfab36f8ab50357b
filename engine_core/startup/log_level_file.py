"""The log level of an engine core, which its supervisor may change while it runs."""

import logging
import threading
from contextlib import suppress
from pathlib import Path
from typing import get_args

from tandem.protocol.logs import LogLevel, set_log_level

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Polling interval of the file in seconds."""


class LogLevelFile:
    """Follower of a file that holds a log level, in a thread of its own.

    A file needs no signal, which would end a process that is only just being started. It need not exist.
    """

    def __init__(self, path: Path, poll_seconds: float = POLL_SECONDS) -> None:
        self._path = path
        self._poll_seconds = poll_seconds
        self._text = ""
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="log-level", daemon=True)

    def start(self) -> None:
        """Take the level that is there now, and every later one."""
        self.read()
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._is_stopped.set()
        self._thread.join()

    def read(self) -> None:
        """Take the level of the file if it is a new one."""
        text = self._text
        with suppress(OSError, UnicodeDecodeError):
            text = self._path.read_text()
        if text != self._text and text in get_args(LogLevel):
            set_log_level(text)  # type: ignore[arg-type]
            self._text = text
            logger.info("the log level is %s now", text)

    def _follow(self) -> None:
        while not self._is_stopped.wait(self._poll_seconds):
            self.read()
