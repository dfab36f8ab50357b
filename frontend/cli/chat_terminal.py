"""Terminal of a chat: line editing, history, and type-ahead."""

import contextlib
import os
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

MAX_HISTORY = 1000
"""Maximum number of lines of the history."""


def history_path() -> Path:
    """Return the history file, in the user's state directory."""
    folder = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification requires that relative paths are ignored.
    base = Path(folder) if os.path.isabs(folder) else Path.home() / ".local" / "state"
    return base / "tandem" / "chat_history"


class LineHistory:
    """History of lines typed in this and earlier runs.

    path: file of the history, readable by its owner only; None keeps it in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def load(self) -> None:
        """Enable line editing and load the history.

        An unusable file is reported on stderr once, and ignored.
        """
        try:
            import readline
        except ImportError:  # Python was built without readline
            self._path = None
            return
        readline.set_auto_history(True)
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            self._path.chmod(0o600)
            readline.set_history_length(MAX_HISTORY)
            readline.read_history_file(self._path)
            if readline.get_current_history_length() > MAX_HISTORY:
                readline.write_history_file(self._path)
        except OSError as error:
            print(f"tandem: no history: {self._path} cannot be used ({error.strerror})", file=sys.stderr)
            self._path = None

    def keep(self) -> None:
        """Append the last line to the file."""
        if self._path is None:
            return
        import readline

        with contextlib.suppress(OSError):
            readline.append_history_file(1, self._path)


@contextlib.contextmanager
def hold_input(terminal: TextIO) -> Iterator[None]:
    """Keep typed characters out of the output, for the next prompt to read.

    Echo is off meanwhile; interrupts still work. Does nothing if `terminal` is not a terminal.
    """
    if not terminal.isatty():
        yield
        return
    descriptor = terminal.fileno()
    before = termios.tcgetattr(descriptor)
    silent = [*before]
    silent[3] &= ~(termios.ECHO | termios.ECHONL)
    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        # Not TCSAFLUSH, which drops unread input.
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
